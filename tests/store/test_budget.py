"""What the store holds against its budget: routings wider than it, none at all, shrinking and growing."""

from __future__ import annotations

import random

from bmoe.native.memory import PAGE

from .world import LINUX, SHAPES, Build, pass_through, whole

pytestmark = LINUX


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
