"""Room for guesses: right bytes and pages over guesses and routings in any order, and a cache that ignores them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bmoe.contracts import ExpertKey
from bmoe.guesses import GuessingStore
from bmoe.native import memory
from bmoe.native.memory import PAGE
from bmoe.store import ExpertStore

from .test_bytes import SHAPE
from .world import LINUX, SHAPES, Shape, World, whole

pytestmark = LINUX


class Guessing(World):
    """A world whose store has room for guesses, which are read as the lane reads them."""

    room = 0

    def __init__(self, fd: int, content: bytes, shape: Shape, budget: int, room: int) -> None:
        self.room = room
        super().__init__(fd, content, shape, budget)

    def make(self, max_mappings: int | None) -> ExpertStore:
        return GuessingStore(self.banks, self.seam, self.policy, self.budget, max_mappings, self.room)

    @property
    def guessing(self) -> GuessingStore:
        assert isinstance(self.store, GuessingStore)
        return self.store

    def guess(self, bank: int, expert: int, instead: ExpertKey | None = None) -> bool:
        """Read one entry ahead, if there is room."""
        (key,) = self.keys(bank, [expert])
        if self.guessing.knows(key) or self.guessing.meets(key, ()):
            return False
        self.policy.gone.clear()
        reads = self.guessing.guess(key, instead)
        self.reference.lost(self.policy.gone)
        if reads is None:
            return False
        self.check_reads(bank, [key], reads)
        self.read(reads)
        return True

    def route(self, bank: int, experts: Sequence[int], *, fails: bool = False) -> None:
        """As without guesses, but what was guessed is not read again."""
        keys, store = self.keys(bank, experts), self.store
        guessed = {key for key in keys if key in self.guessing.guesses}
        self.policy.gone.clear()
        batch = store.stage(bank, keys)
        missing = [key for key in keys if key not in self.reference.resident | guessed]
        gone = [key for key in self.policy.gone if key not in guessed]
        assert (batch is None) == (not missing)
        if batch is not None:
            self.check_reads(bank, missing, batch)
            if not fails:
                self.read(batch)
        if fails:
            store.abandon()
        else:
            store.commit(bank)
        self.reference.routed(keys, gone, arrived=not fails)

    def check(self) -> None:
        """Guesses hold what was read for them, and all that is held is within the budget."""
        store, frames = self.guessing, self.store.frames
        for key in store.guesses:
            bank = next(b for b, base in enumerate(self.seam.key_base) if base >> 16 == key >> 16)
            assert not self.seam.resident[self.seam.entry_base[bank] + (key & 0xFFFF)]
            for address, offset, nbytes in self.spans(bank, key & 0xFFFF):
                assert self.content[offset : offset + nbytes] == bytes(memory.view(address, nbytes))
        counters = store.counters
        for name in ("lookups", "hits", "admissions", "evictions", "rereads"):
            assert getattr(self.reference, name) == getattr(counters, name), name
        used = self.pages(self.reference.resident) | self.pages(store.guesses)
        idle = {page // PAGE for page in frames._idle_edges}
        spare = {(a + n) // PAGE for spans in frames._spares for a, size in spans for n in range(0, size, PAGE)}
        assert not used & spare
        assert len(used) + len(idle) == frames.held
        assert len(spare) == frames.spare <= frames.spare_limit <= max(0, store.room_bytes // PAGE - store._taken)
        assert used <= self.present() <= used | idle | spare, "pages that nobody counts"

    def pages(self, keys: Sequence[ExpertKey] | set[ExpertKey] | dict[ExpertKey, None]) -> set[int]:
        """Numbers of the pages that entries touch."""
        found: set[int] = set()
        for key in keys:
            bank = next(b for b, base in enumerate(self.seam.key_base) if base >> 16 == key >> 16)
            for address, _, nbytes in self.spans(bank, key & 0xFFFF):
                found.update(range(address // PAGE, (address + nbytes - 1) // PAGE + 1))
        return found


@pytest.fixture(name="guessing")
def _guessing(folder: Path) -> Iterator[object]:
    made: list[tuple[World, int]] = []

    def build(shape: Shape, budget: int, room: int | None) -> World:
        _, nbytes = shape.banks()
        content = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
        path = folder / f"guess-{nbytes}-{shape.start}.bin"
        if not path.exists():
            path.write_bytes(content)
        fd = os.open(path, os.O_RDONLY)
        world = World(fd, content, shape, budget) if room is None else Guessing(fd, content, shape, budget, room)
        made.append((world, fd))
        return world

    yield build
    for world, fd in made:
        world.close()
        os.close(fd)


def play(world: Guessing, dice: random.Random, steps: int) -> None:
    """Routings, guesses, those given up for others or for nothing, a room that is lent, failures and resizes."""
    lent = False
    for _ in range(steps):
        for bank, facts in enumerate(world.banks):
            kept = list(world.guessing.guesses)
            for _ in range(0 if lent else dice.randint(0, 3)):
                other = dice.randrange(len(world.banks))
                instead = dice.choice(kept) if kept and dice.random() < 0.3 else None
                expert = dice.randrange(world.banks[other].n_expert)
                if world.guess(other, expert, instead) or instead not in world.guessing.guesses:
                    kept = list(world.guessing.guesses)
                world.check()
            if kept and dice.random() < 0.3:
                world.guessing.forgo(dice.choice(kept))
                world.check()
            experts = dice.sample(range(facts.n_expert), min(facts.n_expert, dice.randint(1, 3)))
            world.route(bank, experts, fails=dice.random() < 0.1)
            world.check()
        world.settle()
        world.check()
        assert world.store.held_bytes <= world.budget
        if dice.random() < 0.2:
            for key in list(world.guessing.guesses):
                world.guessing.forgo(key)
            if dice.random() < 0.5:
                lent = not lent
                world.guessing.lend(lent)
                world.check()
            if dice.random() < 0.5:
                world.settle(resized=max(PAGE, int(world.budget * dice.uniform(0.7, 1.3))))
                world.check()


@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize("name", SHAPES)
def test_bytes_and_pages_stay_right_over_guesses_and_routings(guessing, name: str, share: float) -> None:
    budget = int(whole(SHAPES[name]) * share)

    play(guessing(SHAPES[name], budget, budget // 3), random.Random(name), 25)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(shape=SHAPE, share=st.floats(0.05, 1.1), room=st.floats(0.05, 0.6), seed=st.integers(0, 2**16))
def test_any_shape_budget_and_room_stay_right(guessing, shape: Shape, share: float, room: float, seed: int) -> None:
    budget = int(whole(shape) * share)

    play(guessing(shape, budget, int(budget * room)), random.Random(seed), 6)


@pytest.mark.parametrize("name", SHAPES)
def test_guesses_that_nobody_uses_take_nothing_from_the_cache(guessing, name: str) -> None:
    """Entries of whole pages are evicted alike; with others a page that is shared with a guess may tip the scales."""
    budget = int(whole(SHAPES[name]) * 0.7)
    room = budget // 3 // PAGE * PAGE
    plain, ahead = guessing(SHAPES[name], budget - room, None), guessing(SHAPES[name], budget, room)
    routings, guesses = random.Random(name), random.Random(1)
    read = 0

    for _ in range(30):
        for bank, facts in enumerate(ahead.banks):
            for _ in range(3):
                other = guesses.randrange(len(ahead.banks))
                read += ahead.guess(other, guesses.randrange(ahead.banks[other].n_expert))
            experts = routings.sample(range(facts.n_expert), min(facts.n_expert, 2))
            for key in ahead.keys(bank, experts):
                if key in ahead.guessing.guesses:
                    ahead.guessing.forgo(key)
            for world in (plain, ahead):
                world.route(bank, experts)
            assert plain.reference == ahead.reference or name != "whole aligned pages"
        for world in (plain, ahead):
            world.settle()
    assert read
    assert ahead.reference.hits >= 0.97 * plain.reference.hits


@pytest.mark.parametrize("name", SHAPES)
def test_a_room_that_is_lent_makes_the_cache_what_it_is_without_one(guessing, name: str) -> None:
    budget = int(whole(SHAPES[name]) * 0.6) // PAGE * PAGE
    plain, ahead = guessing(SHAPES[name], budget, None), guessing(SHAPES[name], budget, budget // 3)
    ahead.guessing.lend(True)
    routings, held = random.Random(name), []

    def route(worlds: Sequence[World], times: int) -> None:
        for _ in range(times):
            for bank, facts in enumerate(ahead.banks):
                experts = routings.sample(range(facts.n_expert), min(facts.n_expert, 2))
                for world in worlds:
                    world.route(bank, experts)
            for world in worlds:
                world.settle()
            ahead.check()
            held.append(ahead.store.held_bytes)
            assert held[-1] <= budget

    route((plain, ahead), 20)
    assert plain.reference == ahead.reference
    grown = ahead.store.held_bytes

    ahead.guessing.lend(False)
    route((ahead,), 20)
    assert ahead.store.frames.held * PAGE < max(held), "the next entries that need memory free the room"
    assert ahead.store.frames.held * PAGE <= grown
