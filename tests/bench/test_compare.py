"""The statistics: a verdict is rarely wrong, is there when a difference is plain, and knows no order of sides."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.bench.compare import compare, pairs_needed, student_t, widening

SECONDS = st.floats(1e-4, 1e3)
PAIRS = st.lists(st.tuples(SECONDS, SECONDS), min_size=8, max_size=16)
BENCHES = 400


def bench(draw, rounds, *, faster=1.0, noise=0.08, shared=0.2, drift=0.0, outliers=0.0):
    """Seconds per token of two sides as a machine gives them: what a round shares, noise, drift, and stalls."""
    first, second = [], []
    for index in range(rounds):
        common = draw.gauss(0, shared)
        values = []
        for place in range(2):
            stall = draw.uniform(0.5, 2) if draw.random() < outliers else 0.0
            values.append(math.exp(common + draw.gauss(0, noise) + drift * (2 * index + place)) * (1 + stall))
        a, b = values if index % 2 == 0 else values[::-1]
        first.append(a)
        second.append(b / faster)
    return first, second


def verdicts(rounds, seed, **world):
    draw = random.Random(seed)
    return [compare(*bench(draw, rounds, **world), resamples=1000).verdict for _ in range(BENCHES)]


@pytest.mark.slow
class TestEqualSides:
    """400 benches of equal sides: allowed are 5 %, and 8 % is four standard errors above what a right method shows."""

    @pytest.mark.parametrize("rounds", [6, 8, 16])
    def test_a_verdict_is_rare(self, rounds):
        wrong = sum(verdict is not None for verdict in verdicts(rounds, rounds))

        assert wrong <= 0.08 * BENCHES

    def test_neither_drift_nor_stalls_make_one(self):
        wrong = sum(v is not None for v in verdicts(8, 1, drift=0.03)) + sum(
            v is not None for v in verdicts(8, 2, outliers=0.1)
        )

        assert wrong <= 0.08 * 2 * BENCHES

    def test_among_three_comparisons_any_verdict_is_rare(self):
        """In 3000 benches, with seeds 3 and 4, it was 5.6 %."""
        draw, wrong = random.Random(4), 0
        for _ in range(BENCHES):
            base, first = bench(draw, 8)
            others = [first, *(bench(draw, 8)[1] for _ in range(2))]
            wrong += any(compare(base, side, comparisons=3, resamples=1000).verdict for side in others)

        assert wrong <= 0.08 * BENCHES

    def test_a_plain_percentile_interval_would_be_wrong_more_often(self):
        """What `widening` is for: the same benches without it. This is what makes the tests above able to fail."""
        from bmoe.evaluate.bootstrap import interval

        draw, wrong = random.Random(6), 0
        for _ in range(BENCHES):
            a, b = bench(draw, 6)
            low, high = interval([math.log(x / y) for x, y in zip(a, b, strict=True)], [1.0] * 6, resamples=1000)
            wrong += low > 0 or high < 0

        assert wrong > 0.08 * BENCHES


class TestDifferentSides:
    def test_a_plain_difference_is_found(self):
        found = verdicts(8, 4, faster=1.5)

        assert found.count("faster") >= 0.95 * BENCHES
        assert "slower" not in found

    def test_the_interval_has_the_true_ratio(self):
        draw, missed = random.Random(5), 0
        for _ in range(BENCHES):
            found = compare(*bench(draw, 8, faster=1.2), resamples=1000)
            missed += not found.low <= 1.2 <= found.high

        assert missed <= 0.08 * BENCHES


class TestRules:
    @given(PAIRS)
    @settings(max_examples=30)
    def test_swapping_the_sides_inverts_everything(self, pairs):
        first, second = zip(*pairs, strict=True)
        one, other = (compare(*both, resamples=500) for both in ((first, second), (second, first)))

        assert one.ratio == pytest.approx(1 / other.ratio)
        assert (one.low, one.high) == pytest.approx((1 / other.high, 1 / other.low))
        assert {"faster": "slower", "slower": "faster", None: None}[one.verdict] == other.verdict

    @given(PAIRS, st.floats(0.01, 100))
    @settings(max_examples=30)
    def test_the_unit_of_time_does_not_matter(self, pairs, unit):
        first, second = zip(*pairs, strict=True)
        scaled = compare([unit * x for x in first], [unit * x for x in second], resamples=500)

        assert compare(first, second, resamples=500).ratio == pytest.approx(scaled.ratio)

    @given(PAIRS)
    @settings(max_examples=30)
    def test_a_verdict_is_given_exactly_if_the_interval_excludes_1(self, pairs):
        first, second = zip(*pairs, strict=True)
        found = compare(first, second, resamples=500)

        assert (found.verdict is None) == (found.low <= 1 <= found.high)
        assert found.low <= found.high

    def test_a_bench_without_noise_is_told_to_the_digit(self):
        found = compare([0.3] * 6, [0.1] * 6, resamples=500)

        assert (3, 3, 3) == pytest.approx((found.ratio, found.low, found.high))
        assert "faster" == found.verdict

    def test_few_pairs_have_neither_interval_nor_verdict(self):
        """However clear: of equal sides one is ahead in all of five pairs once in sixteen benches."""
        found = compare([0.3] * 5, [0.1] * 5)

        assert (None, None, None, 6) == (found.low, found.high, found.verdict, found.pairs_needed)

    def test_the_same_seed_gives_the_same_interval(self):
        first, second = bench(random.Random(1), 8)

        assert compare(first, second, seed=3) == compare(first, second, seed=3)
        assert compare(first, second, seed=3).low != compare(first, second, seed=4).low

    @pytest.mark.parametrize(("comparisons", "pairs"), [(1, 6), (2, 7), (4, 8), (25, 10)])
    def test_more_comparisons_need_more_pairs(self, comparisons, pairs):
        assert pairs == pairs_needed(comparisons)

    def test_values_without_a_partner_are_refused(self):
        with pytest.raises(ValueError, match="1 and 2 values make no pairs"):
            compare([1.0], [1.0, 2.0])

    @pytest.mark.parametrize(
        ("p", "degrees", "expected"),
        [
            (0.975, 5, 2.5706),
            (0.975, 7, 2.3646),
            (0.975, 30, 2.0423),
            (0.995, 7, 3.4995),
            (0.999, 10, 4.1437),
            (0.5, 9, 0.0),
        ],
    )
    def test_student_t_is_that_of_the_tables(self, p, degrees, expected):
        assert expected == pytest.approx(student_t(p, degrees), abs=0.01)

    @given(st.integers(6, 500), st.floats(0.9, 0.999))
    def test_an_interval_is_never_narrower_than_the_plain_one(self, n, level):
        assert 1 < widening(n, level) < 3
        assert widening(n + 1, level) < widening(n, level)
