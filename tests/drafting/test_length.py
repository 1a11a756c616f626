"""How long drafts are: what trials may cost at most, how soon a change of text is seen, how near the optimum it is."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.draftlength import DraftLength, Round
from tests.drafting.simulated import PLAIN_BYTES, Run, World, always, each, never, simulate, turns

NOISY = {"noise": 0.3, "outliers": 0.02}
AT_COST = 1.0  # the slope of a verify that costs exactly as much as its tokens one by one


def of_optimum(world: World, chance: float, most: int, run: Run) -> float:
    return run.tokens / run.seconds / max(world.speed(drafted, chance) for drafted in range(most + 1))


def test_fixed_is_always_the_most():
    run = simulate(length := DraftLength(5, governor="fixed"), World(never, slope=AT_COST), 100)

    assert set(run.limits) == {5}
    assert length.off_rounds == 0


@pytest.mark.parametrize("governor", ["auto", "fixed"])
def test_most_0_never_drafts(governor: str):
    assert set(simulate(DraftLength(0, governor=governor), World(), 100).limits) == {0}


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="governor = 'off': use 'auto' or 'fixed'"):
        DraftLength(4, governor="off")
    with pytest.raises(ValueError, match="most = -1: use 0 or more"):
        DraftLength(-1)


ROUNDS = st.lists(
    st.tuples(
        st.integers(0, 20),
        st.integers(0, 20),
        st.floats(0, 100),
        st.integers(0, 10**12),
        st.sampled_from((0.0, 0.02, 1)),
    ),
    max_size=300,
)


@given(st.integers(0, 16), ROUNDS)
def test_limit_stays_within_bounds_whatever_is_measured(most: int, rounds: list[tuple[int, int, float, int, float]]):
    length, off = DraftLength(most), 0
    for wanted, right, seconds, read_bytes, share in rounds:
        assert 0 <= length.limit <= most
        drafted = min(wanted, length.limit)
        off_then, off = off, length.off_rounds
        assert off in {off_then, off_then + 1}
        length.ended(Round(drafted, min(right, drafted), seconds, read_bytes, 1 + share * drafted))


@settings(max_examples=200, deadline=None)
@given(
    most=st.integers(1, 16),
    share=st.floats(0, 2),
    plain=st.integers(1, 10**9),
    seconds=st.lists(st.floats(0, 100), min_size=1, max_size=50),
    parts=st.lists(st.floats(0, 1), min_size=1, max_size=50),
    knows=st.lists(st.booleans(), min_size=1, max_size=20).filter(any),
    tokens=st.integers(200, 900),
)
def test_text_that_never_accepts_costs_3_percent_at_most(
    most: int,
    share: float,
    plain: int,
    seconds: list[float],
    parts: list[float],
    knows: list[bool],
    tokens: int,
):
    """Whatever the clock says: a verify reads up to its width times as much as a token, a draft its share of that."""
    length, read_bytes, decodes = DraftLength(most), 0.0, 0.0
    for at in range(tokens):
        drafted = length.limit * knows[at % len(knows)]
        read = int(plain * (1 + (parts[at % len(parts)] + share) * drafted))
        length.ended(Round(drafted, 0, seconds[at % len(seconds)], read, 1 + share * drafted))
        read_bytes, decodes = read_bytes + read, decodes + 1 + share * drafted

    assert read_bytes <= 1.03 * plain * tokens
    assert decodes <= 1.03 * tokens


def test_a_short_text_that_never_accepts_costs_one_trial_of_single_tokens():
    for tokens in range(1, 200):
        run = simulate(DraftLength(16), World(never, slope=AT_COST, share=1), tokens)

        assert max(run.limits) <= 1
        assert run.decodes - tokens <= 6  # 3 % of 200
        assert run.read_bytes / PLAIN_BYTES - tokens <= 6


def test_trials_do_come_back_on_text_that_never_accepts():
    """Else nothing would be spent, and a change never seen."""
    assert simulate(DraftLength(8), World(never), 1000).limits.count(1) > 10


@pytest.mark.parametrize("seed", range(20))
def test_an_expensive_draft_that_is_never_right_is_off_within_8_rounds(seed: int):
    length = DraftLength(8)
    run = simulate(length, World(never, slope=AT_COST, share=1, **NOISY), 8, seed)

    assert length.limit == 0
    assert length.off_rounds > 0
    assert sum(limit > 0 for limit in run.limits) == 1


@pytest.mark.parametrize("slope", [0.0, 0.1, 0.5, 0.8])
@pytest.mark.parametrize("most", [1, 3, 8, 16])
def test_a_free_draft_that_is_always_right_is_as_long_as_can_be(slope: float, most: int):
    length = DraftLength(most)
    run = simulate(length, World(always, slope=slope), 3000)

    assert most in run.limits[:20]
    assert set(run.limits[20:]) == {0, most}  # 0: what it is compared with is measured anew
    assert run.limits[20:].count(0) / len(run.limits[20:]) < 0.08
    assert length.off_rounds == 0


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("reads", [True, False])
def test_a_draft_that_is_always_right_and_costs_more_than_it_gives_is_off(share: float, reads: bool):
    """Whether reads make it dear, or the processor alone."""
    world = World(always, slope=AT_COST, share=share, bytes_slope=None if reads else -share, **NOISY)
    run = simulate(DraftLength(16), world, 2000)

    assert run.seconds <= 1.05 * run.tokens


@pytest.mark.parametrize("at", range(100, 1000, 37))
@pytest.mark.parametrize("most", [1, 8])
def test_a_text_that_begins_to_accept_is_drafted_within_128_tokens(at: int, most: int):
    run = simulate(DraftLength(most), World(turns(at, 0, 1), share=0.02, **NOISY), at + 400, seed=at)

    on = [began - at for limit, began in zip(run.limits, run.began, strict=True) if began >= at and limit]
    assert on[0] <= 128
    if most > 1:
        assert run.first_on(at) <= 128


@pytest.mark.parametrize("at", range(100, 1000, 37))
def test_a_text_that_ceases_to_accept_is_not_drafted_after_4_rounds(at: int):
    run = simulate(DraftLength(8), World(turns(at, 1, 0), share=0.02, **NOISY), at + 100, seed=at)

    assert sum(limit > 1 for limit in run.since(at)) <= 4


@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95])
def test_it_settles_at_none_where_a_verify_costs_all_its_tokens(chance: float):
    runs = [simulate(DraftLength(8), World(each(chance), slope=AT_COST, **NOISY), 2000, seed) for seed in range(8)]

    assert fmean(fmean(limit == 0 for limit in run.since(200)) for run in runs) > 0.8
    assert min(run.tokens / run.seconds for run in runs) > 0.93


@pytest.mark.parametrize(
    ("chance", "slope", "most"), [(0.8, 0.2, 8), (0.8, 0.1, 8), (0.9, 0.3, 8), (0.6, 0.1, 8), (1.0, 0.1, 16)]
)
def test_it_is_within_10_percent_of_the_optimum(chance: float, slope: float, most: int):
    world = World(each(chance), slope=slope, **NOISY)
    found = [of_optimum(world, chance, most, simulate(DraftLength(most), world, 2000, seed)) for seed in range(8)]

    assert fmean(found) > 0.9
    assert min(found) > 0.85


def test_noise_does_not_switch_off_what_pays():
    world = World(each(0.8), slope=0.2, **NOISY)
    off = [fmean(limit == 0 for limit in simulate(DraftLength(8), world, 2000, seed).limits) for seed in range(8)]

    assert max(off) < 0.2


def test_a_cold_cache_does_not_make_a_draft_pay_for_long():
    """The baseline is of cold tokens; without a new one a verify that costs all its tokens would seem to win."""
    world = World(each(0.8), slope=AT_COST, cold_tokens=3)
    run = simulate(DraftLength(8), world, 400)

    assert fmean(limit == 0 for limit in run.since(40)) > 0.8


def test_a_drafter_that_has_nothing_is_no_reason_to_switch_off():
    length = DraftLength(8)
    run = simulate(length, World(always, knows=0), 300)

    assert length.off_rounds == 0
    assert set(run.limits[3:]) == {1}


def test_a_drafter_that_seldom_has_something_stays_on():
    length = DraftLength(8)
    simulate(length, World(always, knows=0.1), 2000)

    assert length.off_rounds == 0


def test_rounds_with_no_draft_are_what_a_draft_is_compared_with():
    """From the time when decoding takes ten times as long, a draft at the old speed's tenfold pays as it did."""
    length, limits = DraftLength(4), []
    for slower in (1, 10):
        for at in range(60):
            limits.append(length.limit)
            drafted = length.limit if at % 2 else 0
            length.ended(Round(drafted, drafted, slower * (1 + 0.3 * drafted), PLAIN_BYTES, 1))

    assert set(limits[20:]) == {0, 4}
    assert length.off_rounds == 0


def test_a_draft_that_costs_and_proposes_nothing_is_paid_for_like_one_that_was_rejected():
    length, decodes, tokens = DraftLength(8), 0.0, 500
    for _ in range(tokens):
        spent = 1 + 0.5 * (length.limit > 0)
        length.ended(Round(0, 0, spent, PLAIN_BYTES, spent))
        decodes += spent

    assert decodes <= 1.03 * tokens
    assert length.off_rounds > 0


@pytest.mark.parametrize("disturbed", [5, 20, 60])
def test_one_long_round_does_not_keep_it_off(disturbed: int):
    length, limits = DraftLength(8), []
    for at in range(120):
        limits.append(length.limit)
        seconds = (1 + 0.2 * length.limit) * (10 if at == disturbed else 1)
        length.ended(Round(length.limit, length.limit, seconds, PLAIN_BYTES, 1))

    assert fmean(limit == 8 for limit in limits[disturbed + 20 : disturbed + 50]) > 0.7
