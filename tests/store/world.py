"""A store over a real file and real memory beside a naive reference, held against it after every step."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from bmoe.contracts import BankFacts, ExpertKey, ProjectionFacts, ReadBatch
from bmoe.native import memory
from bmoe.native.evalhook import PythonSeam
from bmoe.native.memory import PAGE
from bmoe.store import ExpertStore
from bmoe_plugins.caches.lru import Lru

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page tables are only readable on Linux")


@dataclass(frozen=True)
class Shape:
    """Experts and strides per projection of each layer, packed into a file from ``start`` on."""

    layers: tuple[tuple[int, tuple[int, ...]], ...]
    start: int = 1056

    def banks(self) -> tuple[list[BankFacts], int]:
        """The banks and the bytes of the file."""
        at, banks = self.start, []
        for layer, (n_expert, strides) in enumerate(self.layers):
            projections = []
            for index, stride in enumerate(strides):
                projections.append(ProjectionFacts(f"blk.{layer}.p{index}", f"p{index}", 0, at, stride, "F32"))
                at = (at + stride * n_expert + 31) // 32 * 32
            banks.append(BankFacts(layer, 0, n_expert, min(2, n_expert), tuple(projections)))
        return banks, at


SHAPES = {
    "nine pages at any offset": Shape(((8, (36864,) * 3),) * 3),
    "several experts in a page": Shape(((16, (576, 576, 608)),) * 2),
    "a little more than a page": Shape(((12, (5000, 4640)),) * 3),
    "whole aligned pages": Shape(((8, (2 * PAGE, PAGE)),) * 3, start=PAGE),
    "two pages that hold no whole one": Shape(((9, (5600,)),) * 2, start=2048),
    "mixed strides and projections": Shape(((8, (36864, 30000)), (6, (9000, 9000, 50000)), (12, (700, 16384)))),
    "one expert": Shape(((1, (3 * PAGE + 100,)), (1, (64,)))),
}


class Watched(Lru):
    """LRU that notes what it is told, and checks what a policy may rely on."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[ExpertKey] = []
        self.pins: list[set[ExpertKey]] = []

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        self.pins.append(set(pinned))
        return super().victim(pinned)

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        assert key not in self._order
        super().admit(key, cold)

    def forget(self, key: ExpertKey, /) -> None:
        self.gone.append(key)
        super().forget(key)


@dataclass
class Reference:
    """What should be resident, and what should have been counted."""

    resident: set[ExpertKey] = field(default_factory=set)
    evicted: set[ExpertKey] = field(default_factory=set)
    lookups: int = 0
    hits: int = 0
    admissions: int = 0
    evictions: int = 0
    rereads: int = 0

    def routed(self, keys: Sequence[ExpertKey], gone: Sequence[ExpertKey], *, arrived: bool) -> None:
        missing = [key for key in keys if key not in self.resident]
        self.lookups += len(keys)
        self.hits += len(keys) - len(missing)
        self.admissions += len(missing)
        self.rereads += sum(key in self.evicted for key in missing)
        self.lost(gone)
        if arrived:
            self.resident.update(missing)

    def lost(self, gone: Sequence[ExpertKey]) -> None:
        for key in gone:
            self.resident.remove(key)
            self.evicted.add(key)
            self.evictions += 1


class World:
    """A store over a real file, driven as the stream drives it, and checked after every step."""

    def __init__(self, fd: int, content: bytes, shape: Shape, budget: int, max_mappings: int | None = None) -> None:
        self.fd, self.content, self.budget = fd, content, budget
        self.banks, _ = shape.banks()
        self.seam = PythonSeam(self.banks)
        self.policy = Watched()
        self.store = self.make(max_mappings)
        self.reference = Reference()

    # ---- driving

    def make(self, max_mappings: int | None) -> ExpertStore:
        return ExpertStore(self.banks, self.seam, self.policy, self.budget, max_mappings)

    def keys(self, bank: int, experts: Sequence[int]) -> list[ExpertKey]:
        return [self.seam.key_base[bank] + expert for expert in experts]

    def read(self, reads: ReadBatch) -> None:
        for index in range(len(reads)):
            row = reads.row(index)
            got = os.preadv(self.fd, [memory.view(row.address, row.length)], row.offset)
            assert got >= row.required

    def route(self, bank: int, experts: Sequence[int], *, fails: bool = False) -> None:
        keys, store = self.keys(bank, experts), self.store
        self.policy.gone.clear()
        self.policy.pins.clear()
        if all(key in self.reference.resident for key in keys):
            store.touched(keys)
            self.reference.routed(keys, [], arrived=True)
            return
        batch = store.stage(bank, keys)
        gone = list(self.policy.gone)
        assert not set(gone) & set(keys), "an entry of the routing was evicted for it"
        assert all(pins == set(keys) for pins in self.policy.pins)
        assert batch is not None
        missing = [key for key in keys if key not in self.reference.resident]
        self.check_reads(bank, missing, batch)
        if fails:
            # some reads arrive before one fails
            half = len(batch) // 2
            self.read(ReadBatch(*(getattr(batch, name)[:half] for name in batch.__dataclass_fields__)))
            store.abandon()
        else:
            self.read(batch)
            store.commit(bank)
        self.reference.routed(keys, gone, arrived=not fails)

    def settle(self, resized: int | None = None) -> None:
        self.policy.gone.clear()
        if resized is None:
            self.store.settle()
        else:
            self.budget = resized
            self.store.resize(resized)
        self.reference.lost(self.policy.gone)
        assert self.store.held_bytes <= self.budget

    # ---- checking

    def check_reads(self, bank: int, missing: Sequence[ExpertKey], reads: ReadBatch) -> None:
        """The pages of what is missing and no others, each once, from where they lie in the file."""
        wanted = set()
        for key in missing:
            for stage, (address, offset, nbytes) in enumerate(self.spans(bank, key - self.seam.key_base[bank])):
                pages = range(address // PAGE, (address + nbytes - 1) // PAGE + 1)
                wanted |= {(stage, page, offset // PAGE - address // PAGE) for page in pages}
        found = []
        for row in map(reads.row, range(len(reads))):
            pages = range(row.address // PAGE, (row.address + row.length) // PAGE)
            found += [(row.stage, page, (row.offset - row.address) // PAGE) for page in pages]
        assert sorted(found) == sorted(wanted)

    def spans(self, bank: int, expert: int) -> Iterator[tuple[int, int, int]]:
        """(address, file offset, bytes) of an entry's slices."""
        for address, facts in zip(self.store.addresses[bank], self.banks[bank].projections, strict=True):
            yield address + expert * facts.stride, facts.offset + expert * facts.stride, facts.stride

    def check(self) -> None:
        reference, store = self.reference, self.store
        used: set[int] = set()
        for bank, facts in enumerate(self.banks):
            for expert in range(facts.n_expert):
                key = self.seam.key_base[bank] + expert
                assert (key in reference.resident) == bool(self.seam.resident[self.seam.entry_base[bank] + expert])
                if key not in reference.resident:
                    continue
                for address, offset, nbytes in self.spans(bank, expert):
                    assert self.content[offset : offset + nbytes] == bytes(memory.view(address, nbytes))
                    used.update(range(address // PAGE, (address + nbytes - 1) // PAGE + 1))
        counted = {name: getattr(store.counters, name) for name in ("lookups", "hits", "admissions", "evictions")}
        assert counted == {name: getattr(reference, name) for name in counted}
        assert reference.rereads == store.counters.rereads
        idle = {page // PAGE for page in store.frames._idle_edges}
        assert not idle & used
        assert (len(used) + len(idle)) * PAGE == store.held_bytes
        held = self.present()
        assert used <= held
        assert held <= used | idle, "pages of evicted entries are still there"

    def present(self) -> set[int]:
        """Numbers of the pages of all regions that are in memory."""
        found = set()
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            for row in self.store._regions:
                for region in row:
                    file.seek(region.address // PAGE * 8)
                    entries = memoryview(file.read(region.nbytes // PAGE * 8)).cast("Q")
                    found |= {region.address // PAGE + n for n, entry in enumerate(entries) if entry >> 63}
        return found

    def everything(self) -> int:
        return sum(region.nbytes for row in self.store._regions for region in row)

    def close(self) -> None:
        self.store.close()


Build = Callable[..., World]


def whole(shape: Shape) -> int:
    """Bytes of all pages that the experts of a shape touch, layer by layer."""
    return sum(
        (p.offset % PAGE + p.stride * bank.n_expert + PAGE - 1) // PAGE * PAGE
        for bank in shape.banks()[0]
        for p in bank.projections
    )


def pass_through(world: World, dice: random.Random, failures: float = 0.0, width: int = 3) -> None:
    """One decode: every layer routes, some reads fail, and the decode ends there."""
    for bank, facts in enumerate(world.banks):
        experts = dice.sample(range(facts.n_expert), min(facts.n_expert, dice.randint(1, width)))
        fails = dice.random() < failures
        world.route(bank, experts, fails=fails)
        world.check()
        if fails:
            break
    world.settle()
    world.check()
