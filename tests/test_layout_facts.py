"""Model facts come from gguf headers alone, and every file that is none of ours is refused in one line that helps."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bmoe.contracts import ArchRow
from bmoe.errors import ModelError
from bmoe.layout import read_model
from bmoe.plugins import load_all
from bmoe.registry import load_registry
from bmoe.synth import SHAPES, write_model
from bmoe.synth.recipes import recipe_of
from bmoe.testing.models import TinyModels

SUFFIXES = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
ROWS = {name: ArchRow(name, (SUFFIXES,)) for name in ("qwen3moe", "gpt-oss")}
SHAPE = SHAPES["tiny-qwen3moe"]


@pytest.fixture(scope="module", name="models")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


def refusal(path: Path | str, rows: dict[str, ArchRow] = ROWS) -> str:
    """The message that refuses ``path``: one line that starts with the file."""
    with pytest.raises(ModelError) as caught:
        read_model(path, rows)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path).split("-0000")[0] in text
    assert ";" in text  # what is wrong; the remedy
    return text


# ---- a gguf made by hand: every field can be made wrong


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, value: str | float) -> bytes:
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return text(name) + struct.pack("<If", 6, value)
    return text(name) + struct.pack("<II", 4, value)


def tensor(name: str, shape: tuple[int, ...], offset: int, kind: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def blob(
    keys: dict[str, Any] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    extra: list[bytes] | None = None,
    version: int = 3,
) -> bytes:
    """A small qwen3moe gguf of float32 tensors, with zeros for data."""
    values: dict[str, Any] = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": 1,
        "qwen3moe.expert_count": 4,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.embedding_length": 8,
        "qwen3moe.context_length": 64,
        "qwen3moe.vocab_size": 3,
        **(keys or {}),
    }
    encoded = [key(name, value) for name, value in values.items() if value is not None] + (extra or [])
    plan = {"token_embd.weight": (8, 3), **{f"blk.0.{suffix}.weight": (8, 8, 4) for suffix in SUFFIXES}}
    plan = {name: shape for name, shape in {**plan, **(shapes or {})}.items() if shape}
    offset, table = 0, []
    for name, shape in plan.items():
        table.append(tensor(name, shape, offset))
        offset += (int(np.prod(shape)) * 4 + 31) // 32 * 32
    head = b"GGUF" + struct.pack("<IQQ", version, len(table), len(encoded)) + b"".join(encoded + table)
    return head + bytes(-len(head) % 32) + bytes(offset)


@pytest.fixture(name="write")
def _write(tmp_path: Path) -> Callable[..., Path]:
    def write(data: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


# ---- facts


@pytest.mark.parametrize("like", ["tiny-qwen3moe", "tiny-gpt-oss"])
def test_facts_equal_what_the_gguf_package_reads(models: TinyModels, like: str) -> None:
    path = models.path(like)
    facts = read_model(path, ROWS)

    reader = gguf.GGUFReader(path)
    theirs = {t.name: t for t in reader.tensors}
    shape = SHAPES[like]
    assert (facts.arch, facts.n_layer, facts.n_expert, facts.n_used) == (shape.arch, shape.n_layer, 8, 2)
    assert (facts.n_embd, facts.n_vocab, facts.n_ctx_train) == (shape.n_embd, shape.n_vocab, shape.n_ctx)
    assert facts.chat_template is not None
    assert "add_generation_prompt" in facts.chat_template
    assert [(b.layer, b.bank, [p.suffix for p in b.projections]) for b in facts.banks] == [
        (layer, 0, list(SUFFIXES)) for layer in range(shape.n_layer)
    ]
    for bank in facts.banks:
        for p in bank.projections:
            tensor = theirs.pop(p.tensor)
            assert (p.offset, p.stride * 8) == (tensor.data_offset, tensor.n_bytes)
            assert p.type_name == tensor.tensor_type.name
    assert {t.name: (t.offset, t.nbytes, t.shape, t.type_name) for t in facts.dense} == {
        t.name: (t.data_offset, t.n_bytes, tuple(t.shape.tolist()), t.tensor_type.name) for t in theirs.values()
    }
    assert facts.expert_bytes + facts.dense_bytes <= facts.file_bytes == os.path.getsize(path)
    assert facts.cycle_bytes * 4 == facts.expert_bytes


def test_shards_are_found_beside_the_first(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    facts = read_model(paths[0], ROWS)
    assert [s.path for s in facts.shards] == [str(p) for p in paths]
    assert [p.shard for bank in facts.banks for p in bank.projections] == [1, 1, 2]
    data = [np.frombuffer(paths[p.shard].read_bytes(), "<f4", 64, p.offset) for p in facts.banks[0].projections]
    assert [float(d[0]) for d in data] == [1.0, 2.0, 3.0]


def write_shards(folder: Path) -> list[Path]:
    """Three shards: metadata alone, two expert tensors, the third."""
    shape = SHAPE
    writer = gguf.GGUFWriter(folder / "m.gguf", shape.arch, split_max_tensors=2, small_first_shard=True)
    for name, value in recipe_of(shape).metadata().items():
        if isinstance(value, int):
            writer.add_uint32(name, {"qwen3moe.block_count": 1, "qwen3moe.expert_count": 4}.get(name, value))
    writer.add_uint32("qwen3moe.vocab_size", 3)
    for number, suffix in enumerate(SUFFIXES, start=1):
        writer.add_tensor(f"blk.0.{suffix}.weight", np.full((4, 8, 8), number, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("m-0000*.gguf"))


def test_an_array_of_used_counts_is_read_per_layer(write: Callable[..., Path]) -> None:
    counts = text("qwen3moe.expert_used_count") + struct.pack("<IIQ2I", 9, 4, 2, 3, 1)
    second = {f"blk.1.{suffix}.weight": (8, 8, 4) for suffix in SUFFIXES}
    keys = {"qwen3moe.expert_used_count": None, "qwen3moe.block_count": 2}
    facts = read_model(write(blob(keys, second, [counts])), ROWS)
    assert [bank.n_used for bank in facts.banks] == [3, 1]


def test_layers_of_a_prediction_head_are_counted(write: Callable[..., Path]) -> None:
    facts = read_model(write(blob({"qwen3moe.nextn_predict_layers": 1, "qwen3moe.block_count": 2})), ROWS)
    assert (facts.n_layer, facts.n_nextn, [bank.layer for bank in facts.banks]) == (2, 1, [0])


def test_a_large_vocabulary_costs_little_memory(write: Callable[..., Path]) -> None:
    words = b"".join(text(f"word{i}" + "x" * (i % 300)) for i in range(60000))
    tokens = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 60000) + words
    path = write(blob(extra=[tokens, key("general.name", "after the words")]))
    read_model(path, ROWS)
    tracemalloc.start()
    facts = read_model(path, ROWS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (facts.n_vocab, facts.name) == (60000, "after the words")
    assert peak < 4 << 20 < len(words)


# ---- refusals


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
        (b"\n  <html>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
        (b"PK\x03\x04" + bytes(60), "zip"),
        (b"\x1f\x8b\x08\x00" + bytes(60), "gzip"),
        (struct.pack("<Q", 40) + b'{"__metadata__":{}}' + bytes(60), "safetensors"),
        (b"abcdefgh" * 10, "not a gguf"),
        (b"G", "not a gguf"),
        (b"GGUF", "truncated gguf header"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 1, 1), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 99, 1, 1), "version 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 60), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 61), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 20), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQQ", 9, 8, 1, 1 << 50), "truncated"),
        (blob(extra=[key("general.architecture", "again")]), "appears twice"),
        (blob(extra=[key("general.alignment", 33)]), "power of two"),
        (blob({"general.architecture": None}), "general.architecture"),
        (blob({"general.architecture": "two\nlines"}), "no plain text"),
        (blob({"qwen3moe.block_count": None}), "qwen3moe.block_count"),
        (blob({"qwen3moe.block_count": 0}), "block_count is 0"),
        (blob({"qwen3moe.block_count": 1 << 30}), "layers in metadata"),
        (blob({"qwen3moe.expert_count": 5}), "holds 4 experts, not 5"),
        (blob({"qwen3moe.expert_used_count": 9}), "uses 9 of 4"),
        (blob({"qwen3moe.embedding_length": "8"}), "embedding_length"),
        (blob(shapes={"blk.0.ffn_up_exps.weight": (8, 8, 3)}), "holds 3 experts, not 4"),
        (blob(shapes={"blk.0.ffn_up_exps.weight": (8, 8)}), "not 3 axes"),
        (blob(shapes={"blk.0.ffn_down_exps.weight": ()}), "blk.0.ffn_down_exps.weight"),
        (blob(shapes={"blk.0.ffn_up_chexps.weight": (8, 8, 2)}), "blk.0.ffn_up_chexps.weight is not named"),
        (blob({"qwen3moe.block_count": 2}), "blk.1.ffn_gate_exps.weight"),
        (blob(shapes={f"blk.0.{suffix}.weight": () for suffix in SUFFIXES}), "dense model"),
        (blob({"general.architecture": "lama"}, {f"blk.0.{s}.weight": () for s in SUFFIXES}), "with llama.cpp itself"),
        (blob()[:-1], "truncated: 1 of "),
        (blob()[:-1000], "truncated: 1000 of "),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(write: Callable[..., Path], data: bytes, reason: str) -> None:
    assert reason in refusal(write(data))


def test_the_small_model_by_hand_is_fine(write: Callable[..., Path]) -> None:
    assert read_model(write(blob()), ROWS).n_vocab == 3
    assert read_model(write(blob(version=2)), ROWS).expert_bytes == 3 * 8 * 8 * 4 * 4


def test_an_unknown_architecture_lists_the_known_and_how_to_add_one(write: Callable[..., Path]) -> None:
    keys = {
        name.replace("qwen3moe", "qwen3mow"): 4 for name in recipe_of(SHAPE).metadata() if name.startswith("qwen3moe")
    }
    message = refusal(write(blob({**keys, "general.architecture": "qwen3mow"})))
    for part in ("'qwen3mow'", "close to 'qwen3moe'", "gpt-oss, qwen3moe", "plugins.archs"):
        assert part in message


def test_experts_that_the_row_does_not_name_are_refused(write: Callable[..., Path]) -> None:
    """They would stay in the mapping of the dense weights, and no budget would bound them."""
    message = refusal(write(blob()), {"qwen3moe": ArchRow("qwen3moe", (SUFFIXES[1:],))})
    assert "expert tensor blk.0.ffn_gate_exps.weight is not named by the row of architecture 'qwen3moe'" in message
    assert message.endswith('; add "ffn_gate_exps" to the row\'s experts, in the order of the graph')


def test_experts_under_another_name_in_a_layer_that_may_be_dense_are_refused(write: Callable[..., Path]) -> None:
    rows = {"qwen3moe": ArchRow("qwen3moe", (SUFFIXES,), has=("dense_lead",))}
    keys, other = {"qwen3moe.block_count": 2}, {"blk.1.ffn_mid_exps.weight": (8, 16, 4)}
    assert "blk.1.ffn_mid_exps.weight is not named" in refusal(write(blob(keys, other)), rows)
    assert len(read_model(write(blob(keys)), rows).banks) == 1


def test_what_belongs_to_experts_but_is_none_stays_dense(write: Callable[..., Path]) -> None:
    """Biases and scales of experts, their norms, shared experts, and what is in no layer of the model."""
    names = {f"blk.0.ffn_up_{end}": (8, 4) for end in ("exps.bias", "exps.scale", "exps.input_scale", "shexp.weight")}
    names = {**names, "blk.0.ffn_norm_exps.weight": (8,), "blk.7.ffn_other_exps.weight": (8, 8, 4)}
    assert names.keys() < {t.name for t in read_model(write(blob(shapes=names)), ROWS).dense}


@pytest.mark.parametrize("arch", [row.name for row in load_registry().archs if not row.cannot])
def test_the_rows_of_the_tree_name_every_expert_of_the_synthetic_models(models: TinyModels, arch: str) -> None:
    facts = read_model(models.path(f"tiny-{arch}"), load_all(load_registry()).archs)
    assert [t.name for t in facts.dense if t.name.endswith("exps.weight") and len(t.shape) == 3] == []


def test_damage_in_the_tensor_table_is_refused(write: Callable[..., Path]) -> None:
    good = blob()
    row = good.index(text("blk.0.ffn_up_exps.weight"))
    twice = good.replace(text("blk.0.ffn_up_exps.weight"), text("blk.0.ffn_gate_exps.weight"))
    assert "appears twice" in refusal(write(twice))
    at = row + len(text("blk.0.ffn_up_exps.weight"))
    kind, offset = at + 4 + 24, at + 4 + 24 + 4
    assert "unknown type 200" in refusal(write(good[:kind] + struct.pack("<I", 200) + good[kind + 4 :]))
    assert "was expected" in refusal(write(good[:offset] + struct.pack("<Q", 1 << 63) + good[offset + 8 :]))
    assert "dimensions" in refusal(write(good[:at] + struct.pack("<I", 1 << 31) + good[at + 4 :]))
    huge = struct.pack("<Q", 1 << 63)
    assert "shape" in refusal(write(good[: at + 4] + huge * 3 + good[at + 28 :]))


def test_a_directory_a_missing_file_and_a_pipe_are_refused(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path)
    assert "no such file" in refusal(tmp_path / "absent.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError):
        read_model("nul\0byte.gguf", ROWS)


def test_a_truncated_download_says_how_much_is_missing(models: TinyModels, tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    path.write_bytes(models.path().read_bytes()[:-4096])
    assert "truncated: 4096 of " in refusal(path)


def test_tensor_data_is_never_read(tmp_path: Path) -> None:
    """A model of 17 GB of holes is read at the cost of its header."""
    path = write_model(tmp_path / "m.gguf", "qwen3-30b-a3b", layers=2, sparse=True)
    before = _read_chars()
    facts = read_model(path, ROWS)
    assert facts.expert_bytes == 2 * 128 * 3 * 2048 * 768 * 144 // 256
    assert _read_chars() - before < 8 << 20


def _read_chars() -> int:
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:  # not Linux: nothing to compare
        return 0


# ---- fuzz

FUZZ = settings(
    max_examples=300, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


def survives(path: Path, data: bytes) -> None:
    """Facts or a ModelError of one line, in bounded memory."""
    path.write_bytes(data)
    tracemalloc.start()
    message = ""
    try:
        read_model(path, ROWS)
    except ModelError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "\n" not in message
    assert peak < 8 << 20


@FUZZ
@given(st.binary(max_size=400))
def test_random_bytes_behind_the_magic(tmp_path: Path, data: bytes) -> None:
    survives(tmp_path / "f.gguf", b"GGUF" + struct.pack("<I", 3) + data)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, len(blob()) * 8 - 1)), min_size=1, max_size=8))
def test_flipped_bits(tmp_path: Path, flips: list[tuple[int]]) -> None:
    data = bytearray(blob())
    header = data.index(b"blk.0.ffn_down") + 100
    for (bit,) in flips:
        data[bit // 8 % header] ^= 1 << bit % 8
    survives(tmp_path / "f.gguf", bytes(data))


@FUZZ
@given(st.integers(0, len(blob())))
def test_truncation_anywhere_is_a_model_error(tmp_path: Path, length: int) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(blob()[:length])
    if length < len(blob()):
        refusal(path)
    else:
        read_model(path, ROWS)


@FUZZ
@given(st.integers(0, 300), st.sampled_from([0, 1, 0xFFFFFFFF, 1 << 31, 1 << 62, (1 << 64) - 1, 1 << 20]))
def test_absurd_numbers_anywhere(tmp_path: Path, at: int, number: int) -> None:
    data = blob()
    survives(tmp_path / "f.gguf", data[:at] + struct.pack("<Q", number) + data[at + 8 :])
