"""Files that are odd and right run; files that are odd and wrong are refused in one line, before llama.cpp aborts."""

from __future__ import annotations

import re
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bmoe
from bmoe.errors import BmoeError, ModelError
from bmoe.header import read_header
from bmoe.native import memory
from bmoe.synth import SHAPES, write_model

PROFILE = {"model": {"threads": 1, "ctx": 64, "ubatch": 16}, "cache": {"budget_mb": 0}}
PROMPT = [5, 300, 301, 7, 280, 412, 33]
SMALL = replace(SHAPES["tiny-qwen3moe"], name="small", n_embd=64, n_ff_exp=96, quant="Q8_0")


def logits(path: Path, *overrides: str) -> str | None:
    with bmoe.open(PROFILE, str(path), overrides) as engine, engine.conversation() as conversation:
        assert 4 == len(list(conversation.generate(PROMPT, 4, hash_logits=True)))
        assert conversation.summary is not None
        return conversation.summary.logits_sha256


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ModelError) as caught:
        logits(path, *overrides)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{path}: ")
    assert "; " in line, "no remedy"
    return line


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small.gguf", SMALL)


def rewrite(source: Path, target: Path, alignment: int = 32, rename: Callable[[str], str] = str) -> Path:
    """The same model with another alignment or other names."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_custom_alignment(alignment)
    writer.add_string("general.description", "d" * (alignment + 8))  # so that the data do not begin at a multiple of 32
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            value: Any = field.contents()
            writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(rename(tensor.name), tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


# ---- odd and right


@pytest.mark.parametrize("alignment", [32, 64, 512, 8192])
def test_any_alignment_streams(small: Path, tmp_path: Path, alignment: int) -> None:
    odd = rewrite(small, tmp_path / "odd.gguf", alignment)
    starts = {t.offset for t in read_header(str(odd)).tensors}
    assert all(start % alignment == 0 for start in starts)
    assert logits(odd) == logits(odd, "fetch.plugin=pread") == logits(small, "stream.enabled=false")


def test_names_with_odd_bytes_do_no_harm(small: Path, tmp_path: Path) -> None:
    """In the model's name, and in its path."""
    raw = small.read_bytes().replace(b"synthetic small (4 layers)", b"synthetic \xff\x00\x1b[2J\n (4 layer")
    odd = tmp_path / "a b\n\u20ac.gguf"
    odd.write_bytes(raw)
    assert logits(odd) == logits(small)


# ---- odd and wrong


def test_an_alignment_that_llama_cpp_aborts_on_is_refused(small: Path, tmp_path: Path) -> None:
    odd = rewrite(small, tmp_path / "odd.gguf", 8)
    line = refused(odd)
    assert "no multiple of 32 (general.alignment is 8), and llama.cpp aborts on that; convert the model again" in line


def test_a_name_with_odd_bytes_is_shown_and_not_printed(small: Path) -> None:
    small.write_bytes(small.read_bytes().replace(b"blk.1.ffn_gate_exps.weight", b"blk.1.ffn\x1b[2J_exps.weight"))
    line = refused(small)
    assert "\x1b" not in line


def test_a_type_that_the_reader_does_not_know_is_named(small: Path) -> None:
    data = small.read_bytes()
    name = b"blk.1.ffn_up_exps.weight"
    at = data.index(name) + len(name) + 4 + 3 * 8
    assert struct.unpack_from("<I", data, at) == (8,)
    small.write_bytes(data[:at] + struct.pack("<I", 213) + data[at + 4 :])
    line = refused(small)
    assert "tensor 'blk.1.ffn_up_exps.weight' has the unknown type 213; update bmoe and the gguf package" in line


def test_the_old_layout_of_one_tensor_per_expert_is_explained(small: Path, tmp_path: Path) -> None:
    def old(name: str) -> str:
        return re.sub(r"ffn_(gate|up|down)_exps", r"ffn_\1.0", name)

    line = refused(rewrite(small, tmp_path / "old.gguf", rename=old))
    assert "one tensor each (blk.0.ffn_gate.0.weight), which llama.cpp no longer reads; convert the model again" in line


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("expert_used_count", 0, "qwen3moe.expert_used_count gives 0 for layer 0"),
        ("expert_used_count", 9, "layer 0 uses 9 of 8 experts"),
        ("expert_count", 0, "qwen3moe.expert_count is 0"),
        ("expert_count", 16, "holds 8 experts, not 16"),
    ],
)
def test_counts_of_experts_that_cannot_be_are_refused(small: Path, key: str, value: int, said: str) -> None:
    data = small.read_bytes()
    full = f"qwen3moe.{key}".encode()
    at = data.index(full) + len(full) + 4
    small.write_bytes(data[:at] + struct.pack("<I", value) + data[at + 4 :])
    assert said in refused(small)


@pytest.mark.parametrize("overrides", [(), ("cache.budget_mb=0.5",), ("sampling.temp=1",), ("stream.enabled=false",)])
def test_a_router_that_is_not_a_number_is_reported(small: Path, overrides: tuple[str, ...]) -> None:
    router = next(t for t in read_header(str(small)).tensors if t.name == "blk.2.ffn_gate_inp.weight")
    with open(small, "r+b") as file:
        file.seek(router.offset)
        file.write(np.full(64, np.nan, "<f4").tobytes())
    assert "the model's output is not a number (NaN)" in refused(small, *overrides)


def test_the_engine_goes_on_after_logits_that_are_no_numbers(small: Path) -> None:
    """The error is of a generation, not of the engine."""
    router = next(t for t in read_header(str(small)).tensors if t.name == "token_embd.weight")
    with open(small, "r+b") as file:  # one token's embedding
        file.seek(router.offset + 300 * 64 * 4)
        file.write(np.full(64, np.nan, "<f4").tobytes())
    with bmoe.open(PROFILE, str(small)) as engine, engine.conversation() as conversation:
        with pytest.raises(ModelError, match="not a number"):
            list(conversation.generate(PROMPT, 4))
        assert 4 == len(list(conversation.generate([5, 301, 7], 4)))


# ---- memory


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def hostile(what: str) -> bytes:
    """Headers that are as large as their form allows."""
    n = 60_000
    if what == "keys":
        keys = b"".join(text(b"%05d" % i + b"k" * 900) + struct.pack("<II", 4, 1) for i in range(n))
        return struct.pack("<IQQ", 3, 0, n) + keys
    if what == "arrays":
        array = struct.pack("<IIQ", 9, 4, 4096) + bytes(4 * 4096)
        return struct.pack("<IQQ", 3, 0, 2000) + b"".join(text(b"%05d" % i) + array for i in range(2000))
    if what == "texts":
        value = struct.pack("<I", 8) + text(b"t" * (1 << 20))
        return struct.pack("<IQQ", 3, 0, 64) + b"".join(text(b"%05d" % i) + value for i in range(64))
    rows = (text(b"%06d" % i + b"t" * 900) + struct.pack("<IQIQ", 1, 8, 0, 32 * i) for i in range(n))
    return struct.pack("<IQQ", 3, n, 0) + b"".join(rows) + bytes(32 * (n + 1))


@pytest.mark.parametrize("what", ["keys", "arrays", "texts", "tensors"])
def test_no_header_takes_more_than_a_few_megabytes(tmp_path: Path, what: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + hostile(what))
    read_header(str(write_model(tmp_path / "warm.gguf", SMALL)))  # the type table is built once
    tracemalloc.start()
    try:
        with pytest.raises(BmoeError, match="it would take more than 8 MiB of memory"):
            read_header(str(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20
    assert memory.PAGE > 0
