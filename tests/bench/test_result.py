"""Figures, comparisons and remarks are those of the trials, whatever is missing among them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bmoe.bench.figures import figures, spread
from bmoe.bench.result import Failure, Result, Settings
from bmoe.bench.sides import Side
from tests.bench.trials import ENTRY, run, trial

SIDES = [Side("one", "demo"), Side("two", "demo")]


def result(*trials, sides=SIDES, **fields):
    return Result(sides, Settings(**fields), list(trials), complete=True)


def both(rounds=8, first=None, second=None):
    return [
        each
        for index in range(rounds)
        for each in (trial(0, index, **(first or {})), trial(1, index, **(second or {})))
    ]


class TestFigures:
    def test_they_are_means_of_trials_and_rates_over_all_tokens(self):
        found = figures([trial(0, 0, (0.1, 0.3)), trial(0, 1, (0.3, 0.5)), trial(0, 2, (0.5, 0.7))])

        assert (0.3, 0.4, 0.5) == pytest.approx(dataclasses.astuple(found.token_s))
        assert (2.0, 2.5, 1 / 0.3) == pytest.approx(dataclasses.astuple(found.tok_s))
        assert (3, 0.7, 1 / 3, 2 << 20) == pytest.approx(
            (found.trials, found.slowest_s, found.hit_rate, found.bytes_per_token)
        )
        assert (0.05, 0.05 / 0.4) == pytest.approx((found.read_wait_s, found.read_wait_share))

    def test_warm_up_counts_for_nothing(self):
        assert figures([trial(0, 0, warmup_s=[1.0])]) == figures([trial(0, 0, warmup_s=[100.0, 100.0])])

    def test_what_was_not_measured_is_none(self):
        names = ("hits", "lookups", "bytes", "read_wait_s", "majflt")
        found = figures([trial(0, 0, peak_rss_bytes=None, **{name: [None, None] for name in names})])

        assert {None} == {
            found.hit_rate, found.bytes_per_token, found.read_wait_s, found.read_wait_share, found.majflt_per_token,
            found.peak_rss_bytes,
        }  # fmt: skip

    def test_one_value_has_no_spread(self):
        assert (2.0, 2.0, 2.0) == dataclasses.astuple(spread([2.0]))


class TestComparison:
    def test_only_rounds_that_have_both_sides_count(self):
        trials = [*both(3), trial(0, 3, (9.0, 9.0)), trial(1, 7, (9.0, 9.0))]

        assert (3, 1.0) == pytest.approx((result(*trials).comparison(1).pairs, result(*trials).comparison(1).ratio))

    def test_sides_that_never_met_are_not_compared(self):
        assert result(trial(0, 0), trial(1, 1)).comparison(1) is None
        assert result(trial(0, 0)).figures(1) is None

    def test_twice_as_fast_is_a_ratio_of_two(self):
        found = result(*both(second={"seconds": (0.05, 0.1)})).comparison(1)

        assert ("faster", 2.0) == (found.verdict, pytest.approx(found.ratio))


class TestRemarks:
    def test_a_clean_bench_has_none(self):
        assert [] == list(result(*both()).remarks())

    @pytest.mark.parametrize(
        ("second", "expected"),
        [
            ({"choices": [1, 3], "logits_sha256": "else"}, "two: chooses other tokens than one, although neither is"),
            ({"logits_sha256": "else"}, "two: has other logits than one, although neither is lossy"),
            ({"logits_sha256": "else", "run": run(lossy=True)}, "two: has other logits than one, as one is lossy"),
            ({"logits_sha256": "else", "run": run(model="/n.gguf")}, "two: runs another model than one"),
            ({"tokens": [7, 8]}, "two: decoded tokens of its own, since its vocabulary is another"),
            ({"evictions": [0, 0]}, "two: the cache was still filling when measuring began; raise --warmup"),
            ({"entry": dataclasses.replace(ENTRY, temperature_c=71.0)}, "two: began at 71 °C, one at 50 °C"),
            ({"entry": dataclasses.replace(ENTRY, available_bytes=4 << 30)}, "two: began with 4.0 GiB of memory free"),
        ],
    )
    def test_what_limits_the_conclusion_is_said(self, second, expected):
        (remark,) = result(*both(second=second)).remarks()

        assert remark.startswith(expected)

    def test_a_side_that_differs_from_itself_is_said(self):
        trials = [trial(0, 0), trial(0, 4, logits_sha256="else")]
        (remark,) = result(*trials, sides=SIDES[:1]).remarks()

        assert remark.startswith("one: has other logits from one trial to the next")

    def test_a_busy_machine_is_said_once(self):
        busy = {"entry": dataclasses.replace(ENTRY, load_1min=3.0)}

        assert ["the machine was busy: a load of 3.0 on 2 processors"] == list(
            result(*both(first=busy, second=busy)).remarks()
        )

    def test_a_full_cache_that_misses_nothing_is_not_filling(self):
        assert [] == list(result(*both(second={"evictions": [0, 0], "hits": [3, 3]})).remarks())

    def test_sensors_that_are_not_there_are_no_difference(self):
        silent = {"entry": dataclasses.replace(ENTRY, temperature_c=None, available_bytes=None, load_1min=None)}

        assert [] == list(result(*both(second=silent)).remarks())

    def test_too_few_rounds_are_said(self):
        assert ["--rounds 5 cannot show a difference; a verdict needs 6 rounds"] == list(
            result(*both(5), rounds=5).remarks()
        )


class TestJson:
    def test_it_holds_at_any_time(self):
        for trials in ([], [trial(1, 0)], both(1), both()):
            found = result(*trials)
            found.failures[0] = Failure(0, "killed", "it was killed")
            whole = json.loads(json.dumps(found.as_dict(), allow_nan=False))

            assert (1, "bench") == (whole["schema"], whole["event"])
            assert len(trials) == len(whole["trials"])
            assert "killed" == whole["sides"][0]["failure"]["kind"]

    def test_the_series_of_every_token_is_kept_and_the_run_once_a_side(self):
        whole = result(*both(2)).as_dict()

        assert [[0.1, 0.2]] * 4 == [each["decode_s"] for each in whole["trials"]]
        assert {"entry", "warmup_s", "read_wait_s"} <= whole["trials"][0].keys()
        assert "run" not in whole["trials"][0]
        assert ["/m.gguf"] * 2 == [side["run"]["model"] for side in whole["sides"]]
