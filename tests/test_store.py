"""The store against a naive reference, over a real file and real memory: right bytes, counted pages, nothing left."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bmoe.budget import held_bytes
from bmoe.contracts import BankFacts, ExpertKey, ProjectionFacts, ReadBatch
from bmoe.errors import PluginError
from bmoe.native import memory
from bmoe.native.evalhook import PythonSeam
from bmoe.native.memory import PAGE
from bmoe.store import ExpertStore, SharedSlots
from bmoe_plugins.caches.lru import Lru

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page tables are only readable on Linux")


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
        self.store = ExpertStore(self.banks, self.seam, self.policy, budget, max_mappings)
        self.reference = Reference()

    # ---- driving

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
        assert len(batch) == len(missing) * len(self.banks[bank].projections)
        if fails:
            # some reads arrive before one fails
            half = len(batch) // 2
            self.read(ReadBatch(*(getattr(batch, name)[:half] for name in batch.__dataclass_fields__)))
            store.abandon()
        else:
            self.read(batch)
            store.commit()
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
        idle = {page // PAGE for page in store._idle_edges}
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


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


Build = Callable[..., World]


@pytest.fixture(name="build")
def _build(folder: Path) -> Iterator[Build]:
    worlds: list[World] = []
    files: list[int] = []

    def build(shape: Shape, budget: int, max_mappings: int | None = None) -> World:
        _, nbytes = shape.banks()
        content = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
        path = folder / f"{nbytes}-{shape.start}.bin"
        if not path.exists():
            path.write_bytes(content)
        files.append(os.open(path, os.O_RDONLY))
        worlds.append(World(files[-1], content, shape, budget, max_mappings))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()
    for fd in files:
        os.close(fd)


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


# ---- against the reference


@pytest.mark.parametrize("share", [0.15, 0.35, 0.6, 0.97])
@pytest.mark.parametrize("name", SHAPES)
def test_bytes_counters_and_pages_stay_right_over_random_routings(build: Build, name: str, share: float) -> None:
    world = build(SHAPES[name], int(whole(SHAPES[name]) * share))
    dice = random.Random(f"{name}{share}")
    for _ in range(40):
        pass_through(world, dice, failures=0.1)


@pytest.mark.parametrize("name", SHAPES)
def test_without_failures_every_policy_sees_each_use_and_hits_are_hits(build: Build, name: str) -> None:
    world = build(SHAPES[name], int(whole(SHAPES[name]) * 0.5))
    dice = random.Random(name)
    for _ in range(30):
        pass_through(world, dice, width=2)

    assert world.reference.lookups > world.reference.hits
    assert set(world.policy._order) == world.reference.resident


STRIDES = st.one_of(st.integers(1, 30).map(lambda n: n * 36), st.integers(PAGE - 64, 3 * PAGE), st.just(2 * PAGE))
SHAPE = st.builds(
    Shape,
    st.lists(
        st.tuples(st.integers(1, 7), st.lists(STRIDES, min_size=1, max_size=3).map(tuple)), min_size=1, max_size=3
    ).map(tuple),
    st.integers(0, 260).map(lambda n: n * 32),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(shape=SHAPE, share=st.floats(0.0, 1.2), seed=st.integers(0, 2**16))
def test_any_shape_and_any_budget_stay_right(build: Build, shape: Shape, share: float, seed: int) -> None:
    world = build(shape, int(whole(shape) * share))
    dice = random.Random(seed)
    for _ in range(6):
        pass_through(world, dice, failures=0.15, width=7)
    world.close()


def test_a_budget_of_everything_keeps_everything(build: Build) -> None:
    shape = SHAPES["nine pages at any offset"]
    world = build(shape, sum(bank.n_expert * held_bytes(bank, PAGE) for bank in shape.banks()[0]))
    for bank, facts in enumerate(world.banks):
        world.route(bank, range(facts.n_expert))
    world.settle()

    assert (0, whole(shape)) == (world.store.counters.evictions, world.store.held_bytes)
    for bank, facts in enumerate(world.banks):
        world.route(bank, range(facts.n_expert))
    assert world.store.counters.lookups == 2 * world.store.counters.hits


# ---- pins and the budget


def test_a_routing_wider_than_the_budget_is_held_together_and_given_back_after_the_decode(build: Build) -> None:
    shape = SHAPES["nine pages at any offset"]
    world = build(shape, 60 * PAGE)
    world.route(0, range(8))

    assert world.reference.resident == set(world.keys(0, range(8)))
    assert world.store.held_bytes > world.budget
    world.check()
    world.settle()
    world.check()
    assert 0 < world.store.held_bytes <= world.budget


def test_a_budget_of_nothing_still_serves_every_routing(build: Build) -> None:
    world = build(SHAPES["a little more than a page"], 0)
    dice = random.Random(1)
    for _ in range(10):
        pass_through(world, dice)

    assert 0 == world.store.held_bytes
    assert set() == world.present()


def test_shrinking_evicts_at_once_and_growing_makes_room(build: Build) -> None:
    shape = SHAPES["mixed strides and projections"]
    world = build(shape, int(whole(shape) * 0.9))
    dice = random.Random(2)
    for share in (0.9, 0.3, 0.0, 0.6, 0.1):
        world.settle(int(whole(shape) * share))
        world.check()
        assert share == 0.9 or world.store.budget_bytes == world.budget
        for _ in range(8):
            pass_through(world, dice)


@pytest.mark.parametrize("named", [lambda keys: keys[0], lambda keys: keys[0] | 0xFFFF, lambda keys: 77 << 24])
def test_a_policy_that_names_a_wrong_victim_is_told_so_and_nothing_is_lost_for_good(
    build: Build, monkeypatch: pytest.MonkeyPatch, named: Callable[[list[ExpertKey]], ExpertKey]
) -> None:
    world = build(SHAPES["nine pages at any offset"], 70 * PAGE)
    world.route(0, [0, 1])
    keys = world.keys(1, [2, 3])
    world.store._victim = lambda pinned: named(keys)

    with pytest.raises(PluginError, match="the cache policy named .* as victim, which is not resident or is pinned"):
        world.store.stage(1, keys)

    assert (0, set(), b"") == (world.store.held_bytes, world.present(), bytes(world.seam.resident).strip(b"\0"))
    world.store._victim = world.policy.victim
    world.reference.resident.clear()
    world.reference.lookups, world.reference.admissions = world.store.counters.lookups, world.store.counters.admissions
    world.route(1, [2, 3])
    world.settle()
    world.check()


@pytest.mark.parametrize("call", ["touch", "admit", "victim", "forget"])
@pytest.mark.parametrize("error", [RuntimeError("a plugin"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_after_a_failing_policy_call_the_books_are_right_again(build: Build, call: str, error: BaseException) -> None:
    world = build(SHAPES["a little more than a page"], 24 * PAGE)
    for turn in range(4):
        world.route(turn % 3, [turn, turn + 1, turn + 2])
    attribute = {"touch": "_touch", "admit": "_admitted", "victim": "_victim", "forget": "_forget"}[call]
    real, calls = getattr(world.store, attribute), []

    def fail_once(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == (1 if call == "touch" else 2):
            raise error
        return real(*arguments)

    setattr(world.store, attribute, fail_once)
    with pytest.raises(type(error)) as caught:
        world.store.stage(0, world.keys(0, [5, 7, 9, 10, 11]))
    assert error is caught.value
    setattr(world.store, attribute, real)

    counters = world.store.counters
    resident = {
        world.seam.key_base[bank] + expert
        for bank, facts in enumerate(world.banks)
        for expert in range(facts.n_expert)
        if world.seam.resident[world.seam.entry_base[bank] + expert]
    }
    assert resident == set(world.policy._order)
    world.reference = Reference(
        resident, set(world.store._evicted), counters.lookups, counters.hits, counters.admissions, counters.evictions
    )
    world.reference.rereads = counters.rereads
    world.check()
    dice = random.Random(3)
    for _ in range(10):
        pass_through(world, dice)


# ---- failed reads


def test_after_abandon_nothing_of_the_routing_is_valid_and_its_neighbours_are_whole(build: Build) -> None:
    world = build(SHAPES["several experts in a page"], whole(SHAPES["several experts in a page"]))
    world.route(0, [0, 2, 4])
    world.route(0, [1, 2, 3], fails=True)

    assert set(world.keys(0, [0, 2, 4])) == world.reference.resident
    world.check()
    world.route(0, [1, 3])
    world.check()


def test_abandon_without_a_stage_changes_nothing(build: Build) -> None:
    world = build(SHAPES["whole aligned pages"], 20 * PAGE)
    world.route(0, [0])
    world.store.abandon()
    world.store.commit()
    world.check()


# ---- recycling


def test_an_evicted_entry_gives_its_pages_to_the_newcomer(build: Build) -> None:
    world = build(SHAPES["whole aligned pages"], 6 * PAGE)
    for turn in range(12):
        world.route(turn % 3, [turn % 8, (turn + 3) % 8])
        world.check()

    assert world.store.counters.recycled > 10


@pytest.mark.parametrize("name", SHAPES)
def test_a_kernel_that_moves_no_pages_changes_nothing_but_speed(
    build: Build, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(memory, "recycle", lambda source, target, nbytes: False)
    world = build(SHAPES[name], int(whole(SHAPES[name]) * 0.4))
    dice = random.Random(name)
    for _ in range(20):
        pass_through(world, dice, failures=0.1)

    assert 0 == world.store.counters.recycled


def test_pages_are_moved_only_until_the_mapping_limit_is_near(build: Build) -> None:
    shape = Shape(((64, (2 * PAGE, 2 * PAGE + 64)),) * 4)
    before = memory.count_mappings()
    world = build(shape, int(whole(shape) * 0.3), before + 2048 + 40)
    dice = random.Random(5)
    for _ in range(60):
        pass_through(world, dice, width=6)

    assert 0 < world.store.counters.recycled
    assert 10 <= len(world.store._moved) <= 20
    assert memory.count_mappings() - before < 60


def test_where_no_mapping_is_left_pages_are_released_instead(build: Build) -> None:
    world = build(SHAPES["nine pages at any offset"], 90 * PAGE, memory.count_mappings())
    dice = random.Random(6)
    for _ in range(20):
        pass_through(world, dice)

    assert (0, True) == (world.store.counters.recycled, world.store.counters.evictions > 0)


def test_closing_gives_all_memory_and_mappings_back(build: Build) -> None:
    before = memory.count_mappings()
    world = build(SHAPES["mixed strides and projections"], 40 * PAGE)
    dice = random.Random(7)
    for _ in range(20):
        pass_through(world, dice)
    world.store.close()
    world.store.close()

    assert abs(memory.count_mappings() - before) <= 2


# ---- cache off


def test_shared_slots_hold_the_routing_in_flight_for_any_layer_and_never_more_memory(build: Build) -> None:
    shape = SHAPES["mixed strides and projections"]
    world = build(shape, 0)
    seam = PythonSeam(world.banks)
    slots = SharedSlots(world.banks, seam)
    try:
        for turn in range(6):
            for bank, facts in enumerate(world.banks):
                experts = [turn % facts.n_expert, (turn + 2) % facts.n_expert]
                reads = slots.stage(bank, [seam.key_base[bank] + expert for expert in experts])
                assert reads is not None
                world.read(reads)
                slots.commit()
                for address, projection in zip(slots.addresses[bank], facts.projections, strict=True):
                    for expert in experts:
                        first = projection.offset + expert * projection.stride
                        there = memory.view(address + expert * projection.stride, projection.stride)
                        assert world.content[first : first + projection.stride] == bytes(there)
            slots.settle()
        assert (36, 0, 0) == (slots.counters.lookups, slots.counters.hits, slots.held_bytes)
        assert b"" == bytes(seam.resident).strip(b"\0")
        widest = [
            max(b.projections[p].stride * b.n_expert for b in world.banks if p < len(b.projections)) for p in range(3)
        ]
        assert sum(widest) <= slots.slot_bytes <= sum(widest) + 6 * PAGE
    finally:
        slots.close()
