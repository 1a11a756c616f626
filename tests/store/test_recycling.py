"""Pages of evicted entries go to newcomers within the mapping limit, or back to the system."""

from __future__ import annotations

import random

import pytest

from bmoe.native import memory
from bmoe.native.memory import PAGE

from .world import LINUX, SHAPES, Build, Shape, pass_through, whole

pytestmark = LINUX


def test_an_evicted_entry_gives_its_pages_to_the_newcomer(build: Build) -> None:
    world = build(SHAPES["whole aligned pages"], 6 * PAGE)
    for turn in range(12):
        world.route(turn % 3, [turn % 8, (turn + 3) % 8])
        world.check()

    assert world.store.frames.recycled > 10


@pytest.mark.parametrize("name", SHAPES)
def test_a_kernel_that_moves_no_pages_changes_nothing_but_speed(
    build: Build, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(memory, "recycle", lambda source, target, nbytes: False)
    world = build(SHAPES[name], int(whole(SHAPES[name]) * 0.4))
    dice = random.Random(name)
    for _ in range(20):
        pass_through(world, dice, failures=0.1)

    assert 0 == world.store.frames.recycled


def test_pages_are_moved_only_until_the_mapping_limit_is_near(build: Build) -> None:
    shape = Shape(((64, (2 * PAGE, 2 * PAGE + 64)),) * 4)
    before = memory.count_mappings()
    world = build(shape, int(whole(shape) * 0.3), before + 2048 + 40)
    dice = random.Random(5)
    for _ in range(60):
        pass_through(world, dice, width=6)

    assert 0 < world.store.frames.recycled
    assert 10 <= len(world.store.frames._moved) <= 20
    assert memory.count_mappings() - before < 60


def test_where_no_mapping_is_left_pages_are_released_instead(build: Build) -> None:
    world = build(SHAPES["nine pages at any offset"], 90 * PAGE, memory.count_mappings())
    dice = random.Random(6)
    for _ in range(20):
        pass_through(world, dice)

    assert (0, True) == (world.store.frames.recycled, world.store.counters.evictions > 0)


def test_closing_gives_all_memory_and_mappings_back(build: Build) -> None:
    before = memory.count_mappings()
    world = build(SHAPES["mixed strides and projections"], 40 * PAGE)
    dice = random.Random(7)
    for _ in range(20):
        pass_through(world, dice)
    world.store.close()
    world.store.close()

    assert abs(memory.count_mappings() - before) <= 2
