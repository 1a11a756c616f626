"""A model that cannot be run is refused in one line that says what the file is and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

import bmoe
from bmoe.errors import ModelError, ProfileError

from .runs import PROFILE, expect


def test_a_directory_is_no_model(tmp_path: Path) -> None:
    assert f"{tmp_path}: is a directory; name the .gguf file in it" in expect(ModelError, str(tmp_path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'no.gguf'}: no such file" in expect(ModelError, str(tmp_path / "no.gguf"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html>\n<html><head><title>Sign in</title>", "HTML"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "gguf"),
        (b"GGUF", "gguf"),
        (b"just text", "gguf"),
    ],
    ids=["empty", "html", "png", "short", "text"],
)
def test_a_file_that_is_no_gguf_says_what_it_is(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    text = expect(ModelError, str(path))

    assert text.startswith(f"{path}: ")
    assert said.lower() in text.lower().replace(str(path).lower(), "")


def test_a_dense_model_has_nothing_to_stream(model: str, tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    path.write_bytes(Path(model).read_bytes().replace(b"_exps.weight", b"_exqs.weight"))

    text = expect(ModelError, str(path))

    assert f"{path}: a qwen3moe model without routed experts" in text
    assert "bmoe is for Mixture-of-Experts models under every profile" in text
    assert "run this one with llama.cpp itself" in text
    assert text == expect(ModelError, str(path), profile={"stream": {"enabled": False}})


def test_an_unknown_architecture_lists_the_known_and_how_to_add_one(model: str, tmp_path: Path) -> None:
    path = tmp_path / "unknown.gguf"
    path.write_bytes(Path(model).read_bytes().replace(b"qwen3moe", b"qwen9moe"))

    text = expect(ModelError, str(path))

    assert f"{path}: architecture 'qwen9moe' has experts but no row is known for it" in text
    assert "close to 'qwen3moe'" in text
    assert "known: " in text
    assert "qwen3moe" in text.partition("known: ")[2]
    assert "add one: a TOML file with its row, named in the profile's plugins.archs" in text


def test_a_file_that_llama_cpp_refuses_carries_its_reason(model: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    # the router of one layer under a name that the graph does not know
    path.write_bytes(Path(model).read_bytes().replace(b"blk.1.ffn_gate_inp.weight", b"blk.1.ffn_gate_ixp.weight"))

    text = expect(ModelError, str(path))

    assert text.startswith(f"{path}: llama.cpp cannot load this model: ")
    assert "blk.1.ffn_gate_inp.weight" in text


def test_a_truncated_download_is_refused_before_llama_cpp_maps_it(model: str, tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    content = Path(model).read_bytes()
    path.write_bytes(content[: len(content) // 2])

    assert expect(ModelError, str(path)).startswith(f"{path}: ")


def test_no_model_at_all_says_how_to_give_one() -> None:
    with pytest.raises(ProfileError, match=r"model\.path is missing; give the model with --model FILE"):
        bmoe.open(PROFILE)
