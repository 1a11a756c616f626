"""The order of measurements treats all sides alike."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bmoe.bench.schedule import schedule

SIDES, ROUNDS, PROMPTS = st.integers(1, 6), st.integers(1, 24), st.integers(1, 5)


def rounds(sides, count, prompts=4):
    found: dict[int, list] = {}
    for turn in schedule(sides, count, prompts):
        found.setdefault(turn.round, []).append(turn)
    return list(found.values())


def test_two_sides_take_turns_in_being_first():
    assert [0, 1, 1, 0, 1, 0, 0, 1] == [turn.side for turn in schedule(2, 4, 4)]


@given(SIDES, ROUNDS, PROMPTS)
def test_every_round_has_every_side_once_with_one_prompt(sides, count, prompts):
    found = rounds(sides, count, prompts)

    assert count == len(found)
    for turns in found:
        assert list(range(sides)) == sorted(turn.side for turn in turns)
        assert 1 == len({turn.prompt for turn in turns})


@given(SIDES, st.integers(1, 8))
def test_in_two_rounds_every_side_has_the_same_mean_place(sides, pairs):
    """So what drifts steadily adds the same to each."""
    found = rounds(sides, 2 * pairs)
    for first, second in zip(found[::2], found[1::2], strict=True):
        places = Counter()
        for turns in (first, second):
            places.update({turn.side: place for place, turn in enumerate(turns)})
        assert {sides - 1} == {places[side] for side in range(sides)}


@given(SIDES)
def test_every_side_has_every_place_equally_often(sides):
    seen = Counter((turn.side, place) for turns in rounds(sides, 2 * sides) for place, turn in enumerate(turns))

    assert {2} == {seen[side, place] for side in range(sides) for place in range(sides)}
