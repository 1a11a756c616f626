"""Opening a model does not read its experts, and leaves them out of reach except through the store."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from pathlib import Path

import gguf
import pytest

import bmoe
from bmoe.contracts import ModelFacts
from bmoe.errors import ModelError, NativeError
from bmoe.layout import read_model
from bmoe.native import carve, memory
from bmoe.native.memory import PAGE
from bmoe.synth import SHAPES, write_model
from bmoe.testing.models import TinyModels
from bmoe_plugins.archs.table import bmoe_archs

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mappings are only known on Linux")

PROFILE = {"model": {"threads": 1, "ctx": 128, "ubatch": 16}, "cache": {"budget_mb": 0}}
PROMPT = [5, 300, 301, 7, 280, 412, 33]


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(name="model", scope="module")
def _model(models: TinyModels) -> str:
    return str(models.path())


def facts_of(path: str) -> ModelFacts:
    return read_model(path, {row.name: row for row in bmoe_archs()})


def logits(engine: bmoe.Engine) -> str | None:
    with engine.conversation() as conversation:
        assert 4 == len(list(conversation.generate(PROMPT, 4, hash_logits=True)))
        assert conversation.summary is not None
        return conversation.summary.logits_sha256


def permissions() -> list[tuple[int, int, str]]:
    """(first address, end, permissions) of this process's mappings."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, allowed, *_ = line.split()
        first, _, end = span.partition("-")
        spans.append((int(first, 16), int(end, 16), allowed))
    return spans


def readable(address: int, end: int) -> set[str]:
    """The permissions that the bytes of a range have."""
    found = [span for span in permissions() if span[0] < end and address < span[1]]
    assert end - address == sum(min(last, end) - max(first, address) for first, last, _ in found)
    return {allowed for *_, allowed in found}


def bases(path: str) -> set[int]:
    return memory.file_mappings(os.stat(path).st_ino, path)


# ---- nothing is read


def test_a_cold_open_reads_little_more_than_the_dense_weights(tmp_path: Path) -> None:
    wide = dataclasses.replace(SHAPES["tiny-qwen3moe"], name="wide", n_expert=64, n_ff_exp=512)
    path = str(write_model(tmp_path / "wide.gguf", wide, layers=2, quant="F32"))
    facts = facts_of(path)
    assert 192 << 20 == facts.expert_bytes
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)

    with bmoe.open(PROFILE, path) as engine:
        report = engine.model.report
        assert report.read_bytes is not None
        # the populate runs ahead until the experts are taken away: a window of the device's before the first of them
        assert report.read_bytes < facts.file_bytes / 3
        assert report.read_bytes == engine.record.resolved["open_read_bytes"]
        assert facts.expert_bytes - 4 * PAGE <= report.forbidden_bytes <= facts.expert_bytes
        assert report.seconds > 0
    os.unlink(path)


def test_the_bytes_out_of_reach_are_the_whole_pages_of_the_experts(model: str) -> None:
    facts = facts_of(model)
    experts: set[int] = set()
    for bank in facts.banks:
        for p in bank.projections:
            experts.update(range(p.offset, p.offset + p.stride * bank.n_expert))
    whole = sum(experts.issuperset(range(start, start + PAGE)) for start in range(0, facts.file_bytes, PAGE))

    with bmoe.open(PROFILE, model) as engine:
        assert whole * PAGE == engine.model.report.forbidden_bytes
        (base,) = bases(model)
        (ranges,) = carve.expert_ranges(facts)
        assert whole * PAGE == sum(last - first for first, last in ranges)
        for first, last in ranges:
            assert {"---p"} == readable(base + first, base + last)
        for (_, first), (last, _) in itertools.pairwise(ranges):
            assert {"r--s"} == readable(base + first, base + last)


def test_without_streaming_nothing_is_out_of_reach(model: str) -> None:
    with bmoe.open(PROFILE, model, ["stream.enabled=false"]) as engine:
        (base,) = bases(model)
        assert 0 == engine.model.report.forbidden_bytes
        # llama.cpp itself unmaps the header
        first = min(t.offset for t in engine.facts.dense) // PAGE * PAGE
        last = engine.facts.file_bytes // PAGE * PAGE
        assert all("r" in allowed for allowed in readable(base + first, base + last))


def test_padding_between_expert_tensors_is_taken_and_a_small_tensor_is_not() -> None:
    facts = facts_of_spans([(0, 2 * PAGE + 8), (2 * PAGE + 32, 2 * PAGE), (4 * PAGE + 32 + 256, 2 * PAGE)])

    assert [[(0, 4 * PAGE), (5 * PAGE, 6 * PAGE)]] == carve.expert_ranges(facts)


def facts_of_spans(spans: list[tuple[int, int]]) -> ModelFacts:
    projections = tuple(
        bmoe.ProjectionFacts(f"t{i}", f"t{i}", 0, offset, nbytes, "F32") for i, (offset, nbytes) in enumerate(spans)
    )
    bank = bmoe.BankFacts(0, 0, 1, 1, projections)
    return ModelFacts("m", "m", "a", (bmoe.ShardFacts("m", 1 << 20),), 1, 1, 1, 1, 1, 1, 0, (bank,), ())


# ---- several engines on one file


@pytest.mark.parametrize("first_closes_first", [True, False])
def test_two_engines_on_one_file_both_work_and_close_in_any_order(model: str, first_closes_first: bool) -> None:
    before = bases(model)
    one = bmoe.open(PROFILE, model)
    expected = logits(one)
    two = bmoe.open(PROFILE, model)
    assert one.model.report.forbidden_bytes == two.model.report.forbidden_bytes > 0
    assert expected == logits(two) == logits(one)
    (ranges,) = carve.expert_ranges(one.facts)
    assert 2 == len(bases(model))
    assert all({"---p"} == readable(base + first, base + last) for base in bases(model) for first, last in ranges)
    closes, stays = (one, two) if first_closes_first else (two, one)
    closes.close()
    assert expected == logits(stays)
    with bmoe.open(PROFILE, model) as third:
        assert expected == logits(third)
    stays.close()

    assert before == bases(model)


def test_a_model_reached_through_a_symbolic_link_opens_alike(model: str, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    with bmoe.open(PROFILE, model) as engine:
        expected, forbidden = logits(engine), engine.model.report.forbidden_bytes

    with bmoe.open(PROFILE, str(link)) as engine:
        assert (expected, forbidden) == (logits(engine), engine.model.report.forbidden_bytes)


def test_a_mapping_that_is_nowhere_to_be_found_is_an_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "file_mappings", lambda inode, path: set())

    with pytest.raises(NativeError, match="the model's mapping was not found in this process"):
        bmoe.open(PROFILE, model)


def test_a_late_carver_costs_time_and_not_correctness(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with bmoe.open(PROFILE, model) as engine:
        expected, forbidden = logits(engine), engine.model.report.forbidden_bytes
    monkeypatch.setattr(carve.Carver, "_watch", lambda carver: None)

    with bmoe.open(PROFILE, model) as engine:
        assert (expected, forbidden) == (logits(engine), engine.model.report.forbidden_bytes)


def test_what_fails_in_the_carving_thread_fails_the_open(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise NativeError("cannot make 4096 bytes inaccessible: Cannot allocate memory")

    monkeypatch.setattr(memory, "forbid", refuse)
    with pytest.raises(NativeError, match="cannot make .* inaccessible"):
        bmoe.open(PROFILE, model)
    monkeypatch.undo()
    with bmoe.open(PROFILE, model) as engine:
        assert logits(engine)


# ---- several files


@pytest.fixture(name="shards", scope="module")
def _shards(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same model, split into three files."""
    folder = tmp_path_factory.mktemp("shards")
    reader = gguf.GGUFReader(model)
    arch = reader.get_field("general.architecture").contents()
    per_shard = -(-len(reader.tensors) // 3)
    writer = gguf.GGUFWriter(str(folder / "split.gguf"), arch, split_max_tensors=per_shard)
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        writer.add_key_value(name, entry.contents(), entry.types[0], entry.types[-1] if len(entry.types) > 1 else None)
    for t in reader.tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(str(path) for path in folder.iterdir())


@pytest.mark.parametrize("budget", [0, 2])
@pytest.mark.parametrize("fetcher", ["pread", "aio"])
def test_a_split_model_gives_the_same_logits_from_its_shards(
    model: str, shards: list[str], budget: int, fetcher: str
) -> None:
    with bmoe.open(PROFILE, model) as engine:
        expected = logits(engine)
    assert 3 == len(shards)

    with bmoe.open(PROFILE, shards[0], [f"cache.budget_mb={budget}", f"fetch.plugin={fetcher}"]) as engine:
        assert expected == logits(engine)
        assert {0, 1, 2} >= {p.shard for bank in engine.facts.banks for p in bank.projections}
        assert 2 <= len({p.shard for bank in engine.facts.banks for p in bank.projections})
        ranges = carve.expert_ranges(engine.facts)
        assert engine.model.report.forbidden_bytes == sum(last - first for spans in ranges for first, last in spans)
        for shard, spans in zip(shards, ranges, strict=True):
            (base,) = bases(shard)
            assert all({"---p"} == readable(base + first, base + last) for first, last in spans)


def test_a_shard_that_is_missing_is_named(shards: list[str], tmp_path: Path) -> None:
    for shard in shards[:2]:
        (tmp_path / Path(shard).name).write_bytes(Path(shard).read_bytes())

    with pytest.raises(ModelError, match=rf"1 of 3 shards are missing \({Path(shards[2]).name}\)"):
        bmoe.open(PROFILE, str(tmp_path / Path(shards[0]).name))
