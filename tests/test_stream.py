"""What happens between a router and its experts, in order: earlier hits, then room, reads, and only then validity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from bmoe.contracts import (
    BankFacts,
    CacheFacts,
    ExpertKey,
    Facts,
    FetchFacts,
    ModelFacts,
    ProjectionFacts,
    ReadBatch,
    ShardFacts,
    Ticket,
)
from bmoe.errors import ReadError
from bmoe.native import memory
from bmoe.native.evalhook import PythonSeam
from bmoe.slots import SharedSlots
from bmoe.store import ExpertStore, StoreCounters
from bmoe.stream import Stream
from bmoe_plugins.caches.lru import Lru
from bmoe_plugins.fetch.pread import PreadFetcher

STRIDE = 5000
BANKS = tuple(
    BankFacts(
        layer,
        0,
        6,
        2,
        tuple(
            ProjectionFacts(f"blk.{layer}.p{p}", f"p{p}", 0, 96 + (layer * 2 + p) * 6 * STRIDE, STRIDE, "F32")
            for p in range(2)
        ),
    )
    for layer in range(3)
)


@dataclass
class Batch:
    """Stands in for the reads of one stage."""

    nbytes: int = 4096

    def __len__(self) -> int:
        return 3


@dataclass
class Script:
    """A store and a fetcher that write down what is asked of them, and fail where they are told to."""

    fails: dict[str, BaseException] = field(default_factory=dict)
    said: list[object] = field(default_factory=list)
    batch: Batch | None = field(default_factory=Batch)
    counters: StoreCounters = field(default_factory=StoreCounters)
    direct: bool = True
    note: str = ""

    def _say(self, what: str, *more: object) -> None:
        self.said.append((what, *more))
        if what in self.fails:
            raise self.fails[what]

    def touched(self, keys: list[ExpertKey]) -> None:
        self._say("touched", keys)

    def stage(self, bank: int, keys: list[ExpertKey]) -> Batch | None:
        self._say("stage", bank, keys)
        return self.batch

    def commit(self, bank: int) -> None:
        self._say("commit")

    def abandon(self) -> None:
        self._say("abandon")

    def settle(self) -> None:
        self._say("settle")

    def submit(self, reads: Batch, /) -> Batch:
        self._say("submit")
        return reads

    def wait(self, ticket: Batch, upto: int, /) -> int:
        self._say("wait", upto)
        return ticket.nbytes

    def cancel(self, ticket: Batch, /) -> None:
        self._say("cancel")


def scripted(**fails: BaseException) -> tuple[PythonSeam, Script, Stream]:
    seam, script = PythonSeam(BANKS), Script(fails)
    return seam, script, Stream(seam, script, script)  # type: ignore[arg-type]


def test_a_miss_is_staged_read_and_only_then_valid() -> None:
    seam, script, stream = scripted()
    seam._touched = [[7, 8], [9]]

    seam.handler(1, [1, 2])

    assert [
        ("touched", [7, 8]),
        ("touched", [9]),
        ("stage", 1, [1, 2]),
        ("submit",),
        ("wait", 1),
        ("commit",),
    ] == script.said
    assert (4096, 3) == (stream.counters.read_bytes, stream.counters.reads)
    assert stream.counters.wait_s > 0
    assert stream.counters.manage_s > 0


def test_nothing_is_read_when_nothing_is_missing_after_all() -> None:
    seam, script, stream = scripted()
    script.batch = None

    seam.handler(0, [1])

    assert [("stage", 0, [1])] == script.said
    assert (0, 0, 0.0) == (stream.counters.read_bytes, stream.counters.reads, stream.counters.wait_s)


@pytest.mark.parametrize("where", ["submit", "wait", "commit"])
@pytest.mark.parametrize("error", [ReadError("gone"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_fails_after_staging_abandons_and_passes_as_itself(where: str, error: BaseException) -> None:
    seam, script, stream = scripted(**{where: error})

    with pytest.raises(type(error)) as caught:
        seam.handler(0, [1])

    assert error is caught.value
    assert ("abandon",) == script.said[-1]
    assert (("commit",) in script.said) == (where == "commit")
    del script.fails[where]
    seam.handler(0, [1])
    assert ("commit",) == script.said[-1]
    assert stream.counters.reads >= 3


@pytest.mark.parametrize("where", ["touched", "stage"])
def test_what_fails_before_anything_is_staged_is_passed_on_without_reading(where: str) -> None:
    error = RuntimeError("policy")
    seam, script, _ = scripted(**{where: error})
    seam._touched = [[4]]

    with pytest.raises(RuntimeError) as caught:
        seam.handler(0, [1])

    assert error is caught.value
    assert "submit" not in {said[0] for said in script.said}  # type: ignore[index]


def test_settling_accounts_for_logged_hits_first() -> None:
    seam, script, stream = scripted()
    seam._touched = [[4, 5]]

    stream.settle()

    assert [("touched", [4, 5]), ("settle",)] == script.said
    assert [] == seam.drain()


# ---- with a real file


@pytest.fixture(name="file", scope="module")
def _file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stream") / "data.bin"
    nbytes = 96 + 36 * STRIDE
    path.write_bytes(np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8).tobytes())
    return path


def facts_of(path: Path, lanes: int) -> Facts:
    shards = (ShardFacts(str(path), path.stat().st_size),)
    model = ModelFacts(str(path), "m", "qwen3moe", shards, 3, 6, 2, 8, 8, 8, 0, BANKS, ())
    return Facts(model, CacheFacts(0, 0, 6), FetchFacts((str(path),), lanes, False, 12))


class Wired:
    """Seam, store, fetcher and stream over one real file."""

    def __init__(self, path: Path, *, budget: int, lanes: int) -> None:
        self.content = path.read_bytes()
        self.seam = PythonSeam(BANKS)
        self.store = ExpertStore(BANKS, self.seam, Lru(), budget, None) if budget else SharedSlots(BANKS, self.seam)
        self.fetcher = PreadFetcher(facts_of(path, lanes))
        self.stream = Stream(self.seam, self.store, self.fetcher)

    def holds(self, bank: int, expert: int) -> bool:
        return all(
            self.content[p.offset + expert * p.stride :][: p.stride]
            == bytes(memory.view(address + expert * p.stride, p.stride))
            for address, p in zip(self.store.addresses[bank], BANKS[bank].projections, strict=True)
        )


@pytest.fixture(name="wired", params=[(0, 1), (0, 4), (60 * 4096, 1), (60 * 4096, 4)], ids=str)
def _wired(file: Path, request: pytest.FixtureRequest) -> Iterator[Wired]:
    budget, lanes = request.param
    wired = Wired(file, budget=budget, lanes=lanes)
    yield wired
    wired.fetcher.close()
    wired.store.close()


def test_every_routing_finds_its_bytes_in_place(wired: Wired) -> None:
    for turn in range(30):
        bank, experts = turn % 3, [turn % 6, (turn + 1 + turn % 4) % 6]
        wired.seam.handler(bank, [wired.seam.key_base[bank] + expert for expert in experts])

        assert all(wired.holds(bank, expert) for expert in experts)
    wired.stream.settle()
    assert wired.stream.counters.reads > 0
    assert wired.stream.counters.read_bytes >= wired.stream.counters.reads * STRIDE


def test_a_read_that_fails_is_read_again_the_next_time(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    real = wired.fetcher.wait

    def wait(ticket: Ticket, upto: int, /) -> int:
        real(ticket, upto)
        for batch in (ticket.flight.reads,):  # type: ignore[attr-defined]
            assert isinstance(batch, ReadBatch)
            memory.fill(int(batch.address[0]), 0xAA, int(batch.length[0]))
        raise ReadError("one of them")

    keys = [wired.seam.key_base[1] + 2, wired.seam.key_base[1] + 4]
    monkeypatch.setattr(wired.fetcher, "wait", wait)
    with pytest.raises(ReadError):
        wired.seam.handler(1, keys)
    assert b"" == bytes(wired.seam.resident).strip(b"\0")
    monkeypatch.undo()

    wired.seam.handler(1, keys)

    assert wired.holds(1, 2)
    assert wired.holds(1, 4)
