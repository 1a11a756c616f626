"""Right bytes, counters and pages over any routings and shapes, against a naive reference."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bmoe.budget import held_bytes
from bmoe.native.memory import PAGE

from .world import LINUX, SHAPES, Build, Shape, pass_through, whole

pytestmark = LINUX


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
