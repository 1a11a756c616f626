"""Memory of cached experts in large folios: counted, moved, given back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bmoe.frames import CHUNK, FramePool
from bmoe.native import memory
from bmoe.native.memory import PAGE

from .world import LINUX, Build, Shape, pass_through, whole

pytestmark = LINUX
BIG = Shape(((24, (40 * PAGE + 1056, 33 * PAGE)),) * 40)
"""Slices of more than 64 KiB, 300 MB in all: large enough for a pool."""


def test_entries_of_a_large_cache_are_right_wherever_their_memory_came_from(build: Build) -> None:
    world = build(BIG, 96 << 20)
    dice = random.Random(1)
    for _ in range(4):
        pass_through(world, dice, failures=0.02, width=12)

    assert world.store.frames.recycled > 100
    assert whole(BIG) > world.budget
    assert world.store.held_bytes <= world.budget


def test_what_waits_in_the_pool_is_counted_and_given_back_when_the_cache_shrinks(build: Build) -> None:
    world = build(BIG, 96 << 20)
    world.route(0, [0, 1])
    held = world.store.held_bytes
    assert held >= CHUNK
    assert held % CHUNK != 0
    entries = sum(len(set(pages)) for pages in [world.present()]) * PAGE
    assert entries < held, "the pool holds the rest of its huge page"

    world.settle(entries)

    assert world.present()
    assert world.store.held_bytes == entries
    world.check()


@pytest.mark.parametrize("fails", ["populate", "recycle"])
def test_a_kernel_that_cannot_populate_or_move_changes_nothing_but_speed(
    build: Build, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(memory, fails, lambda *arguments: False)
    world = build(BIG, 80 << 20)
    dice = random.Random(2)
    for _ in range(3):
        pass_through(world, dice, width=12)

    assert world.store.frames.recycled == 0 or fails == "populate"


def test_a_pool_gives_contiguous_zeroed_memory_and_starts_again_at_its_end() -> None:
    pool, place = FramePool(4 * CHUNK), memory.reserve(64 * CHUNK)
    try:
        size = 200 * PAGE
        for turn in range(40):
            address = place.address + turn * size
            assert pool.give(address, size, 4 * CHUNK)
            assert bytes(size) == bytes(memory.view(address, size))
            memory.fill(address, turn + 1, size)
        assert all(memory.view(place.address + turn * size, 1)[0] == turn + 1 for turn in range(40))
        assert not pool.give(place.address, 5 * CHUNK, 64 * CHUNK)
        assert pool.idle_bytes < CHUNK
        assert not pool.give(place.address, pool.idle_bytes + PAGE, 0), "it would hold more than it may"
    finally:
        pool.close()
        pool.close()
        place.close()


def test_the_pool_is_of_huge_pages_where_the_system_grants_them() -> None:
    granted = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not granted.exists() or "[never]" in granted.read_text():
        pytest.skip("this system has no transparent huge pages")
    pool, place = FramePool(4 * CHUNK), memory.reserve(8 * CHUNK)
    try:
        assert pool.give(place.address, PAGE, 4 * CHUNK)
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(pool._next // PAGE * 8)
            frames = [n & (1 << 55) - 1 for n in memoryview(file.read(64 * 8)).cast("Q")]
        if not any(frames):
            pytest.skip("page frame numbers are shown to root only")
        assert frames == list(range(frames[0], frames[0] + 64)), "physically contiguous"
    finally:
        pool.close()
        place.close()
