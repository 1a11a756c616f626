"""The one definition of ``struct ggml_tensor`` agrees with libggml-base, or nothing is rebound."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bmoe
from bmoe import engine
from bmoe.errors import NativeError
from bmoe.native import tensor
from bmoe.synth import write_model

FIELDS: list[tuple[Any, ...]] = list(tensor.GgmlTensor._fields_)


def reordered(first: str, second: str) -> type[ctypes.Structure]:
    """The structure with two fields exchanged."""
    names = [name for name, *_ in FIELDS]
    i, j = names.index(first), names.index(second)
    fields = list(FIELDS)
    fields[i], fields[j] = fields[j], fields[i]
    return type("Reordered", (ctypes.Structure,), {"_fields_": fields})


@pytest.fixture(name="unchecked")
def _unchecked() -> Iterator[None]:
    tensor.self_check.cache_clear()
    yield
    tensor.self_check.cache_clear()


@pytest.mark.usefixtures("unchecked")
def test_the_structure_agrees_with_the_installed_ggml() -> None:
    tensor.self_check()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ("type", "op", "type"),
        ("ne", "nb", "ne"),
        ("op", "flags", "op"),
        ("src", "view_src", "src"),
        ("view_src", "view_offs", "view_src"),
        ("view_offs", "data", "data"),
        ("data", "name", "name"),
    ],
)
def test_exchanged_fields_are_refused_and_named(
    monkeypatch: pytest.MonkeyPatch, first: str, second: str, named: str
) -> None:
    monkeypatch.setattr(tensor, "GgmlTensor", reordered(first, second))

    with pytest.raises(NativeError, match=rf"struct ggml_tensor differs from this llama-cpp-python: {named} reads"):
        tensor.self_check()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("missing", ["padding", "extra"])
def test_a_structure_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    fields = [field for field in FIELDS if field[0] != missing]
    monkeypatch.setattr(tensor, "GgmlTensor", type("Short", (ctypes.Structure,), {"_fields_": fields}))

    with pytest.raises(NativeError, match="size reads"):
        tensor.self_check()


@pytest.mark.usefixtures("unchecked")
def test_a_mismatch_is_refused_before_a_model_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[object] = []
    model = str(write_model(tmp_path / "tiny.gguf", "tiny-qwen3moe", layers=1))
    monkeypatch.setattr(tensor, "GgmlTensor", reordered("ne", "nb"))
    monkeypatch.setattr(engine, "Model", lambda *args, **kwargs: opened.append(args))

    with pytest.raises(NativeError, match="install a tested version"):
        bmoe.open({}, model=model)

    assert [] == opened


def test_operations_have_numbers_and_unknown_ones_are_refused() -> None:
    assert tensor.op_code("MUL_MAT") != tensor.op_code("MUL_MAT_ID")
    with pytest.raises(NativeError, match="no operation MUL_MAT_IDX"):
        tensor.op_code("MUL_MAT_IDX")
