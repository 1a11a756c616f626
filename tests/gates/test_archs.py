"""The in-tree architectures pass their gate, and the gate fails for what it is there to find."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bmoe.contracts import Fetcher, ReadBatch
from bmoe.errors import ModelError
from bmoe.native import memory
from bmoe.native.carve import Carver
from bmoe.registry import load_registry
from bmoe.store import ExpertStore
from bmoe.testing.archs import ArchGates, Bench, Cell, session_bench

THOROUGH = ("glm4moe", "gpt-oss", "qwen3moe")
"""In every way at each run; the others in a few, and those that people ask for most in every way in the long run."""
CHARTER = ("qwen2moe", "qwen35moe", "gemma4", "lfm2moe", "deepseek4")


def gate_of(arch: str, thorough: bool, ending: str = "") -> tuple[str, type[ArchGates]]:
    """The gate of a row of the table, as a class of its own."""
    name = "Test" + re.sub(r"\W", "_", arch.title()) + ending
    body = {"plugin": "bmoe", "provider": arch, "arch": arch, "thorough": thorough, "__module__": __name__}
    return name, type(name, (ArchGates,), body)


globals().update(gate_of(row.name, row.name in THOROUGH) for row in load_registry().archs if not row.cannot)
globals().update(
    (name, pytest.mark.slow(gate)) for name, gate in (gate_of(arch, True, "InEveryWay") for arch in CHARTER)
)


# ---- the gate can fail


@pytest.fixture(name="bench")
def bench_(request, tmp_path_factory) -> Bench:
    return session_bench(request, tmp_path_factory)


class Altered:
    """A fetcher that passes on something else than it was given."""

    def __init__(self, inner: Fetcher, alter: Callable[[ReadBatch], ReadBatch], direct: bool | None = None) -> None:
        self.inner, self.alter = inner, alter
        self.direct, self.note = inner.direct if direct is None else direct, inner.note

    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Any:
        return self.inner.submit(self.alter(reads), ahead=ahead)

    def wait(self, ticket: Any, upto: int, /) -> int:
        return self.inner.wait(ticket, upto)

    def ready(self, ticket: Any, upto: int, /) -> bool:
        return self.inner.ready(ticket, upto)

    def cancel(self, ticket: Any, /) -> None:
        self.inner.cancel(ticket)

    def close(self) -> None:
        self.inner.close()


def with_fetcher(wrap: Callable[[Fetcher], Fetcher]) -> ArchGates:
    class Faulty(ArchGates):
        plugin, provider, arch = "bmoe", "qwen3moe", "qwen3moe"

        def plan(self, path: Path, cell: Cell):
            plan = super().plan(path, cell)
            provider = plan.fetch.provider
            built = replace(provider, build=lambda options, facts: wrap(provider.build(options, facts)))
            return replace(plan, fetch=replace(plan.fetch, provider=built))

    return Faulty()


def with_row(experts: str, folder: Path) -> ArchGates:
    rows = folder / "rows.toml"
    rows.write_text(f'[[arch]]\nname = "qwen3moe"\nreplaces = "qwen3moe"\nexperts = [{experts}]\n')

    class OtherRow(ArchGates):
        plugin, provider, arch = "bmoe", "qwen3moe", "qwen3moe"

    OtherRow.rows = (str(rows),)
    return OtherRow()


def whole() -> ArchGates:
    return with_fetcher(lambda fetcher: fetcher)


def taken(reads: ReadBatch, rows: slice) -> ReadBatch:
    columns = (reads.address, reads.length, reads.required, reads.offset, reads.shard, reads.stage)
    return ReadBatch(*[column[rows] for column in columns])


@pytest.mark.parametrize("budget", ["off", "half", "all"])
def test_a_wrong_offset_is_found(bench: Bench, budget: str):
    gate = with_fetcher(lambda f: Altered(f, lambda reads: replace(reads, offset=reads.offset + memory.PAGE)))

    with pytest.raises(AssertionError, match="prompt of 1 tokens: logits first differ after part 1 of 1 of the prompt"):
        gate.check(bench, Cell(budget))


@pytest.mark.parametrize("budget", ["off", "half", "all"])
def test_one_read_too_few_is_found(bench: Bench, budget: str):
    gate = with_fetcher(lambda f: Altered(f, lambda reads: taken(reads, slice(0, -1))))

    with pytest.raises(AssertionError, match="logits first differ"):
        gate.check(bench, Cell(budget))


def test_one_page_too_few_late_in_a_generation_names_its_step(bench: Bench):
    batches = []

    def shorten(reads: ReadBatch) -> ReadBatch:
        batches.append(reads)
        cut = memory.PAGE if len(batches) == 4 * 3 + 1 else 0  # 4 layers; the prompt of one token and two more
        return replace(reads, length=reads.length - cut, required=reads.required - cut)

    gate = with_fetcher(lambda f: Altered(f, shorten))

    with pytest.raises(
        AssertionError, match=r"prompt of 1 tokens: logits first differ after token 3 \(decode 4 of 6\)"
    ):
        gate.check(bench, Cell("off"))


def test_bytes_that_did_not_come_from_a_read_are_found(bench: Bench):
    class Generous(Altered):
        def wait(self, ticket: Any, upto: int, /) -> int:
            return super().wait(ticket, upto) + memory.PAGE

    gate = with_fetcher(lambda f: Generous(f, lambda reads: reads))

    with pytest.raises(AssertionError, match="the bytes that arrived are not those of the entries that missed"):
        gate.check(bench, Cell())


def test_direct_reads_that_nobody_asked_for_are_found(bench: Bench):
    gate = with_fetcher(lambda f: Altered(f, lambda reads: reads, direct=True))

    with pytest.raises(AssertionError, match="direct although buffered"):
        gate.check(bench, Cell(direct=False))


@pytest.mark.parametrize("overlap", ["off", "projection"])
def test_a_row_in_another_order_is_refused_with_the_order_of_the_graph(bench: Bench, tmp_path: Path, overlap: str):
    """With overlap a product would be computed before its reads have arrived."""
    gate = with_row('["ffn_up_exps", "ffn_gate_exps", "ffn_down_exps"]', tmp_path)

    with pytest.raises(ModelError, match="says: ffn_gate_exps, ffn_up_exps, ffn_down_exps .layer 0.; write experts"):
        gate.check(bench, Cell(overlap=overlap))


def test_a_bank_that_a_row_splits_is_refused_with_where_it_belongs(bench: Bench, tmp_path: Path):
    gate = with_row('["ffn_gate_exps"], ["ffn_up_exps", "ffn_down_exps"]', tmp_path)

    with pytest.raises(ModelError, match="the graph routes it with the first; put it into the row's first bank"):
        gate.check(bench, Cell())


def test_a_row_that_misses_a_tensor_is_refused(bench: Bench, tmp_path: Path):
    """What it misses would stay in the model's own mapping: the same logits, but nothing would bound its memory."""
    gate = with_row('["ffn_gate_exps", "ffn_down_exps"]', tmp_path)

    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up_exps\.weight is not named by the row"):
        gate.check(bench, Cell())


def test_an_entry_that_is_valid_before_its_read_arrived_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    stage, abandon = ExpertStore.stage, ExpertStore.abandon

    def too_early(self: ExpertStore, bank: int, keys: list[int]) -> ReadBatch | None:
        batch = stage(self, bank, keys)
        for key in keys:
            self._resident[self._entry_base[bank] + (key & 0xFFFF)] = 1
        return batch

    def knows_nothing_of_it(self: ExpertStore) -> None:
        before = bytes(self._resident)
        abandon(self)
        self._resident[:] = before

    monkeypatch.setattr(ExpertStore, "stage", too_early)
    monkeypatch.setattr(ExpertStore, "abandon", knows_nothing_of_it)

    with pytest.raises(AssertionError, match="logits first differ"):
        whole().test_a_failed_read_leaves_nothing_valid(bench, 3, Cell("half", seam="python"))


def test_an_entry_that_stays_valid_when_it_is_evicted_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    evict = ExpertStore._evict

    def forgetful(self: ExpertStore, pinned: Any) -> Any:
        before = bytes(self._resident)
        spans = evict(self, pinned)
        self._resident[:] = before
        return spans

    monkeypatch.setattr(ExpertStore, "_evict", forgetful)

    with pytest.raises(AssertionError, match="logits first differ"):
        whole().check(bench, Cell("cycle"))


def test_a_cache_that_is_never_used_is_found(bench: Bench):
    class Uncached(ArchGates):
        plugin, provider, arch = "bmoe", "qwen3moe", "qwen3moe"

        def plan(self, path: Path, cell: Cell):
            return super().plan(path, replace(cell, budget="off"))

    with pytest.raises(AssertionError, match="the policy was never asked"):
        Uncached().check(bench, Cell("half"))


def test_a_policy_that_is_not_told_of_hits_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    def deaf(self: ExpertStore, keys: list[int]) -> None:
        self.counters.lookups += len(keys)
        self.counters.hits += len(keys)

    monkeypatch.setattr(ExpertStore, "touched", deaf)

    with pytest.raises(AssertionError, match="the policy does not see every use"):
        whole().check(bench, Cell("all"))


def test_a_budget_with_room_for_everything_is_no_gate_for_eviction(bench: Bench):
    class Roomy(ArchGates):
        plugin, provider, arch = "bmoe", "qwen3moe", "qwen3moe"

        def plan(self, path: Path, cell: Cell):
            return super().plan(path, replace(cell, budget="all"))

    with pytest.raises(AssertionError, match="nothing was evicted"):
        Roomy().check(bench, Cell("half"))


def test_a_cache_over_its_budget_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ExpertStore, "settle", lambda self: None)
    monkeypatch.setattr(ExpertStore, "_make_room", lambda self, pages, limit, donor=(): donor)

    with pytest.raises(AssertionError, match="the cache holds more than its budget"):
        whole().check(bench, Cell("layer"))


def test_experts_within_reach_of_the_mapping_are_found(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Carver, "_carve", lambda self, base, path, ranges: None)

    with pytest.raises(AssertionError, match=r"\.gguf"):
        whole().test_mapping_is_out_of_reach(bench)


def test_an_architecture_without_a_small_model_is_told_what_to_do(bench: Bench):
    class Unknown(ArchGates):
        plugin, provider, arch = "umbra", "umbramoe", "umbramoe"

    with pytest.raises(pytest.fail.Exception, match=r"no tiny 'umbramoe'; override model\(\)"):
        Unknown().check(bench, Cell())


def test_an_architecture_without_a_small_model_is_one_failure(tmp_path: Path):
    """And not one for each of the gate's tests."""
    (tmp_path / "test_unknown.py").write_text(
        "from bmoe.testing import ArchGates\n\n\nclass TestUnknown(ArchGates):\n    arch = 'umbramoe'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False, cwd=tmp_path)

    assert done.returncode != 0
    assert re.search(r"^E? *bmoe\.synth has no tiny 'umbramoe'; override model\(\)", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1].startswith("1 error in ")
