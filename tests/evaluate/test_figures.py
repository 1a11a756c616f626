"""Metrics against values worked out by hand and against naive forms; the bootstrap against known cases."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bmoe.evaluate.bootstrap import interval
from bmoe.evaluate.grading import final_number, reply_of
from bmoe.evaluate.metrics import aggregate, common_prefix, divergence, log_softmax, mean, metrics_of

ROWS = arrays.arrays(np.float32, 9, elements=st.floats(-50, 50, width=32))


class TestLogSoftmax:
    def test_by_hand(self):
        assert log_softmax(np.log(np.array([1, 2, 5], np.float32))) == pytest.approx(np.log([1 / 8, 2 / 8, 5 / 8]))

    @given(ROWS)
    def test_as_the_naive_form(self, row):
        naive = [float(x) - math.log(math.fsum(math.exp(float(y)) for y in row)) for x in row]

        assert log_softmax(row) == pytest.approx(naive, abs=1e-9)

    def test_large_logits_do_not_overflow(self):
        assert [0.0, -1e4] == log_softmax(np.array([1e4, 0], np.float32)).tolist()


class TestDivergence:
    def test_by_hand(self):
        p, q = np.log([0.5, 0.5]), np.log([0.75, 0.25])

        assert divergence(p, q) == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
        assert divergence(q, p) == pytest.approx(0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5))

    @given(ROWS, ROWS)
    def test_as_the_naive_form_and_never_negative(self, one, other):
        p, q = log_softmax(one), log_softmax(other)
        naive = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))

        assert divergence(p, q) == pytest.approx(naive, abs=1e-9)
        assert divergence(p, q) >= 0

    @given(ROWS)
    def test_of_equal_rows_is_exactly_zero(self, row):
        assert 0.0 == divergence(log_softmax(row), log_softmax(row))

    def test_what_the_reference_excludes_counts_nothing(self):
        with np.errstate(divide="ignore"):
            p, q = np.log([1.0, 0.0]), np.log([0.5, 0.5])

        assert divergence(p, q) == pytest.approx(math.log(2))
        assert math.inf == divergence(q, p)


class TestFinalNumber:
    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("2 + 3 = 5\n#### 5", "5"),
            ("#### 18 apples and that was 3 days ago\nThen 4 more", "3"),
            ("#### 5\nno wait\n#### 6\n7 is not it", "6"),
            ("####\nSo it is 9", "9"),
            ("#### none; he has 12", "12"),
            ("The answer is 7.", "7"),
            ("The answer is $1,234,567.50.", "1234567.50"),
            ("It costs €20", "20"),
            ("12,5", "5"),
            ("1,2,3", "3"),
            ("minus: -4", "-4"),
            ("-$4", "-4"),
            ("$-4", "-4"),
            ("\u22124 degrees", "-4"),
            ("10-4", "4"),
            ("10 - 4", "4"),
            ("75%", "75"),
            ("3km", "3"),
            ("007", "7"),
            ("1234,567", "567"),
        ],
    )
    def test_by_hand(self, text, number):
        assert Decimal(number) == final_number(text)

    @pytest.mark.parametrize("text", ["", "none", "####", "#### many", "\u0664"])
    def test_there_may_be_none(self, text):
        assert final_number(text) is None

    @given(st.integers(-(10**12), 10**12))
    def test_thousands_may_have_commas(self, number):
        assert Decimal(number) == final_number(f"It is #### {number:,} in all.")

    @given(st.text())
    def test_any_text_has_a_number_or_none(self, text):
        found = final_number(text)

        assert found is None or found.is_finite()

    def test_numbers_are_equal_however_written(self):
        assert final_number("42.00") == final_number("42")

    def test_a_reply_ends_before_the_next_question(self):
        assert "It is 4." == reply_of("It is 4.\nQuestion: and 5?\nAnswer: 6")


class TestBootstrap:
    def test_one_item_has_no_interval(self):
        assert interval([1.0], [2.0]) is None
        assert interval([], []) is None

    def test_equal_items_have_an_interval_of_no_width(self):
        assert (0.5, 0.5) == interval([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])

    def test_two_items_reach_from_one_to_the_other(self):
        """Each resample is both of one, both of the other or one of each; a quarter is more than 2.5 %."""
        assert (0.0, 1.0) == interval([0.0, 1.0], [1.0, 1.0])

    def test_the_seed_decides(self):
        values = np.random.default_rng(1).normal(size=20).tolist()
        ones = [1.0] * 20

        assert interval(values, ones, seed=3) == interval(values, ones, seed=3)
        assert interval(values, ones, seed=3) != interval(values, ones, seed=4)

    def test_of_many_values_it_is_that_of_the_normal_distribution(self):
        """mean ± 1.96 s / √n, for which 2000 resamples are good to a few per cent."""
        values = np.random.default_rng(2).normal(5, 2, 400)
        low, high = interval(values.tolist(), [1.0] * 400)
        half = 1.96 * values.std() / 20

        assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
        assert high == pytest.approx(values.mean() + half, abs=0.1 * half)

    def test_of_a_share_it_is_that_of_the_binomial_distribution(self):
        low, high = interval([1.0] * 30 + [0.0] * 70, [1.0] * 100)

        assert (0.21, 0.39) == (pytest.approx(low, abs=0.015), pytest.approx(high, abs=0.015))

    def test_items_are_drawn_with_their_counts(self):
        """A long item and a short one: the mean is that of all tokens, never of items."""
        low, high = interval([100.0, 1.0], [100.0, 4.0], seed=0)

        assert (0.25, 1.0) == (low, high)

    def test_it_covers_the_truth_about_as_often_as_it_says(self):
        rng = np.random.default_rng(5)
        hits = 0
        for seed in range(100):
            ends = interval(rng.normal(size=40).tolist(), [1.0] * 40, seed=seed, resamples=300)
            hits += ends[0] <= 0 <= ends[1]

        assert 87 <= hits <= 100


class TestAggregate:
    def test_perplexity_is_that_of_all_tokens(self):
        scores = [{"nll": 2.0, "tokens": 4}, {"nll": 1.0, "tokens": 2}]
        out = aggregate(scores, "perplexity")

        assert (6, 2) == (out["n"], out["items"])
        assert [math.exp(0.5)] * 3 == pytest.approx([out["value"], out["low"], out["high"]])
        assert 0.5 == mean(scores, "nll")

    def test_accuracy_counts_each_item_once(self):
        out = aggregate([{"right": 1}, {"right": 0}, {"right": 1}, {"right": 1}], "accuracy")

        assert (0.75, 4, 4) == (out["value"], out["n"], out["items"])
        assert 0 <= out["low"] < 0.75 < out["high"] <= 1

    def test_what_was_not_compared_has_no_part(self):
        out = aggregate([{"right": 1}, {"right": 1, "agree": 3, "compared": 4}], "agreement")

        assert {"value": 0.75, "low": None, "high": None, "n": 4, "items": 1} == out

    def test_of_nothing_there_is_no_value(self):
        assert {"value": None, "low": None, "high": None, "n": 0, "items": 0} == aggregate([], "perplexity")

    def test_a_hopeless_model_has_an_infinite_perplexity(self):
        assert math.inf == mean([{"nll": 1e5, "tokens": 1}], "perplexity")

    def test_which_metrics_a_format_has(self):
        assert ["perplexity", "nll"] == metrics_of("text", paired=False)
        assert ["accuracy", "accuracy_norm", "agreement", "kl"] == metrics_of("choice", paired=True)
        assert ["exact_match"] == metrics_of("gsm8k", paired=False)


@pytest.mark.parametrize(
    ("rows", "count"), [([[1, 2, 3], [1, 2, 4]], 2), ([[1, 2], [1, 2, 3]], 2), ([[1], [2]], 0), ([[], [1]], 0)]
)
def test_common_prefix(rows, count):
    assert count == common_prefix(rows)
