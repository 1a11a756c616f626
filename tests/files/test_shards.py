"""A model in several files streams like one in one file, and what is wrong with its files is told apart."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import bmoe
from bmoe.errors import ModelError
from bmoe.header import read_header
from bmoe.synth import SHAPES, write_model
from bmoe.testing.shards import split_model

PROFILE = {"model": {"threads": 1, "ctx": 64, "ubatch": 16}, "cache": {"budget_mb": 0}}
PROMPT = [5, 300, 301, 7, 280, 412, 33]
SMALL = replace(SHAPES["tiny-qwen3moe"], name="small", n_embd=64, n_ff_exp=96, n_vocab=512, quant="Q8_0")


def logits(path: Path, *overrides: str) -> str | None:
    with bmoe.open(PROFILE, str(path), overrides) as engine, engine.conversation() as conversation:
        assert 4 == len(list(conversation.generate(PROMPT, 4, hash_logits=True)))
        assert conversation.summary is not None
        return conversation.summary.logits_sha256


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        bmoe.open(PROFILE, str(path))
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.fixture(scope="module", name="whole")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whole") / "whole.gguf", SMALL)


def by_turns(count: int, first: int = 0) -> Callable[[str], int]:
    """Every tensor to the next shard, from ``first`` on: no layer's experts stay together."""
    seen: dict[str, int] = {}
    return lambda name: first + seen.setdefault(name, len(seen)) % (count - first)


@pytest.fixture(name="shards")
def _shards(whole: Path, tmp_path: Path) -> Sequence[Path]:
    return split_model(whole, tmp_path, by_turns(3), 3)


@pytest.mark.parametrize(("count", "first"), [(3, 0), (4, 1)], ids=["by turns", "metadata-only first shard"])
@pytest.mark.parametrize("fetcher", ["aio", "pread"])
def test_experts_of_one_layer_may_be_spread_over_shards(
    whole: Path, tmp_path: Path, count: int, first: int, fetcher: str
) -> None:
    paths = split_model(whole, tmp_path, by_turns(count, first), count)
    with bmoe.open(PROFILE, str(paths[0])) as engine:
        homes = {p.shard for p in engine.facts.banks[0].projections}
    assert len(homes) > 1
    assert first == 0 or 0 not in {t.shard for t in engine.facts.dense}
    resident = logits(whole, "stream.enabled=false")
    assert resident == logits(paths[0], "stream.enabled=false") == logits(paths[0], f"fetch.plugin={fetcher}")
    assert resident == logits(paths[0], "cache.budget_mb=0.5")


def test_more_than_two_hundred_shards_stream_and_are_all_closed(tmp_path: Path) -> None:
    many = write_model(tmp_path / "many.gguf", replace(SMALL, n_layer=20, n_embd=32, n_ff_exp=32))
    tensors = len(read_header(str(many)).tensors)
    assert tensors > 200
    paths = split_model(many, tmp_path, by_turns(tensors), tensors)
    before = len(os.listdir("/proc/self/fd"))
    assert logits(many, "stream.enabled=false") == logits(paths[0])
    assert len(os.listdir("/proc/self/fd")) == before


def test_missing_shards_are_counted_and_named(shards: Sequence[Path]) -> None:
    shards[1].unlink()
    assert refused(shards[0]) == (f"{shards[0]}: 1 of 3 shards are missing (model-00002-of-00003.gguf); download them")


def test_a_later_shard_is_answered_with_the_name_of_the_first(shards: Sequence[Path]) -> None:
    assert refused(shards[1]) == f"{shards[1]}: is shard 2 of 3; name the first shard, {shards[0]}"


def test_a_renamed_first_shard_is_told_its_name(shards: Sequence[Path], tmp_path: Path) -> None:
    other = shards[0].rename(tmp_path / "model.gguf")
    line = refused(other)
    assert line.startswith(f"{other}: is shard 1 of 3 but is not named NAME-00001-of-00003.gguf; ")


def test_exchanged_shards_are_called_so(shards: Sequence[Path], tmp_path: Path) -> None:
    shards[1].rename(tmp_path / "aside")
    shards[2].rename(shards[1])
    (tmp_path / "aside").rename(shards[2])
    line = refused(shards[0])
    assert line.startswith(f"{shards[1]}: says that it is shard 3 of 3 but is named as number 2: shards were renamed")


def test_a_first_shard_in_the_place_of_another_is_called_so(shards: Sequence[Path]) -> None:
    shards[0].replace(shards[1])
    assert "says that it is shard 1 of 3 but is named as number 2" in refused(shards[1])


def test_a_copy_of_another_shard_is_called_one(shards: Sequence[Path]) -> None:
    shutil.copy(shards[1], shards[2])
    line = refused(shards[0])
    assert line == f"{shards[2]}: is a copy of shard 2, model-00002-of-00003.gguf; download shard 3 again"


def test_a_truncated_shard_is_named_with_what_is_missing(shards: Sequence[Path]) -> None:
    size = shards[2].stat().st_size
    os.truncate(shards[2], size - 1000)
    line = refused(shards[0])
    assert line.startswith(f"{shards[2]}: truncated: ")
    assert "the download is incomplete" in line


def apart(name: str) -> int:
    """The same tensors, split in another way."""
    return 2 if "blk.1." in name else 1 if "blk" in name else 0


@pytest.mark.parametrize(
    ("layers", "count", "place", "said"),
    [
        (2, 3, by_turns(3), "belongs to a model of 27 tensors, the first shard to one of 51; all shards have to be of"),
        (4, 4, by_turns(4), "belongs to a model of 4 shards, not to one of 3; download it again"),
        (4, 3, apart, "one of the two is a shard of another model, download both again"),
    ],
    ids=["fewer tensors", "more shards", "another order"],
)
def test_a_shard_of_another_model_is_called_so(
    shards: Sequence[Path], tmp_path: Path, layers: int, count: int, place: Callable[[str], int], said: str
) -> None:
    (tmp_path / "other").mkdir()
    other = write_model(tmp_path / "other.gguf", SMALL, layers=layers, seed=1)
    shutil.copy(split_model(other, tmp_path / "other", place, count)[2], shards[2])
    line = refused(shards[0])
    assert line.startswith(f"{shards[2]}: ")
    assert said in line


def test_a_shard_that_is_no_gguf_is_named(shards: Sequence[Path]) -> None:
    shards[1].write_bytes(b"<!DOCTYPE html>")
    assert refused(shards[0]).startswith(f"{shards[1]}: is an HTML page, not a gguf")


def test_numbers_that_cannot_be_are_damage(whole: Path, tmp_path: Path) -> None:
    (path,) = split_model(whole, tmp_path, lambda name: 0, 1)
    data = path.read_bytes()
    at = data.index(b"split.count") + len("split.count") + 4
    path.write_bytes(data[:at] + (0xFFFF).to_bytes(2, "little") + data[at + 2 :])
    assert "damaged gguf header: it says that it is shard 0 (from 0) of 65535" in refused(path)
