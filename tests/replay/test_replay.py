"""The replay counts what a store would, and Belady's bound is the true maximum."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.errors import PluginError
from bmoe.replay import Trace, batches, cycle, entries, most_hits, replay
from bmoe.testing import traces
from bmoe_plugins.caches.lru import Lru
from bmoe_plugins.caches.none import NoPolicy

SMALL = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True)).map(lambda t: [t]),
    max_size=9,
)


def exhaustive(trace: Trace, room: int) -> int:
    """The most hits, by trying every set that could be kept after every touch."""
    touches = [frozenset(keys) for keys in batches(trace)]

    @cache
    def best(index: int, kept: frozenset[int]) -> int:
        if index == len(touches):
            return 0
        union = kept | touches[index]
        choices = (frozenset(c) for c in combinations(sorted(union), min(room, len(union))))
        return len(kept & touches[index]) + max(best(index + 1, choice) for choice in choices)

    return best(0, frozenset())


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(SMALL, st.integers(2, 5))
def test_belady_is_the_true_maximum(trace: Trace, room: int) -> None:
    assert most_hits(trace, room) == exhaustive(trace, room)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(SMALL, st.integers(0, 6))
def test_no_policy_passes_belady(trace: Trace, room: int) -> None:
    bound = most_hits(trace, room)
    assert replay(Lru(), trace, room).hits <= bound
    assert replay(NoPolicy(), trace, room).hits <= bound


def test_counts_by_hand() -> None:
    trace = [[(0, (1, 2)), (1, (1,))], [(0, (2, 3)), (1, (1,))], [(0, (1, 2)), (1, (4,))]]
    played = replay(Lru(), trace, 4)
    # step 1: 3 misses; step 2: 2 and layer 1's 1 hit, 3 is admitted; step 3: both hit, and 4 displaces layer 0's 3
    assert (played.lookups, played.hits, played.victims) == (9, 4, (3,))
    assert played.hit_rate == 4 / 9


def test_without_capacity_nothing_is_kept_between_steps() -> None:
    played = replay(Lru(), traces.repeat(layers=1, steps=5), 0)
    assert (played.hits, played.evictions) == (0, played.lookups)


def test_a_layer_larger_than_the_capacity_is_admitted_whole() -> None:
    assert replay(Lru(), [[(0, (1, 2, 3)), (0, (1, 2, 3))]], 2).hits == 3


@pytest.mark.parametrize("answer", [lambda pinned: 99, lambda pinned: next(iter(pinned)), lambda pinned: None])
def test_a_wrong_victim_is_refused(answer: object) -> None:
    policy = Lru()
    policy.victim = answer  # type: ignore[assignment, method-assign]
    with pytest.raises(PluginError, match="victim"):
        replay(policy, [[(0, (1, 2))], [(0, (3, 4))]], 2)


@pytest.mark.parametrize("name", sorted(traces.GOLDEN))
def test_traces_are_well_formed(name: str) -> None:
    trace = traces.GOLDEN[name]()
    assert cycle(trace) == traces.LAYERS * traces.USED
    assert all(len(set(experts)) == len(experts) for step in trace for _, experts in step)
    assert entries(trace) <= traces.LAYERS * traces.EXPERTS


def test_traces_repeat_for_a_seed_and_differ_for_another() -> None:
    assert traces.zipf(1) == traces.zipf(1) != traces.zipf(2)
    assert traces.locality(1) == traces.locality(1) != traces.locality(2)


def test_hit_rate_of_nothing_is_unmeasured() -> None:
    assert replay(Lru(), [], 4).hit_rate is None
