"""The figures of the governor in docs/explanation/drafting.md are those that the simulator gives."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from bmoe.draftlength import DraftLength
from tests.drafting.simulated import PLAIN_BYTES, World, each, simulate, turns

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "drafting.md").read_text("utf-8")
MOST, TOKENS, SEEDS = 8, 2000, range(8)
NOISY = {"noise": 0.3, "outliers": 0.02}


@pytest.mark.parametrize(
    ("chance", "slope"),
    [(0.0, 1.0), (0.3, 0.1), (0.5, 0.3), (0.6, 0.1), (0.8, 0.1), (0.8, 0.2), (0.9, 0.3), (0.8, 1.0), (0.95, 1.0)],
)
def test_speed_beside_the_best_fixed_length(chance: float, slope: float):
    world = World(each(chance), slope=slope, **NOISY)
    fixed = [world.speed(drafted, chance) for drafted in range(MOST + 1)]
    runs = [simulate(DraftLength(MOST), world, TOKENS, seed) for seed in SEEDS]
    speed, worst = fmean(run.tokens / run.seconds for run in runs), min(run.tokens / run.seconds for run in runs)

    row = f"| {chance} | {slope} | {fixed.index(max(fixed))} | {max(fixed):.2f} | {fixed[MOST]:.2f} "
    assert row + f"| {speed:.2f} | {worst:.2f} |" in PAGE


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_what_text_that_never_accepts_costs(share: float):
    world = World(each(0), slope=1.0, share=share, **NOISY)
    found = []
    for tokens in (50, 200, 2000):
        runs = [simulate(DraftLength(MOST), world, tokens, seed) for seed in SEEDS]
        found += [max(run.read_bytes / PLAIN_BYTES / run.tokens - 1 for run in runs)]

    assert f"| {share} | " + " | ".join(f"{100 * more:.1f} %" for more in found) + " |" in PAGE


def test_how_soon_a_change_is_seen():
    later, rounds = [], []
    for at in range(100, 1000, 37):
        begins = simulate(DraftLength(MOST), World(turns(at, 0, 1), share=0.02, **NOISY), at + 400, seed=at)
        ceases = simulate(DraftLength(MOST), World(turns(at, 1, 0), share=0.02, **NOISY), at + 100, seed=at)
        later.append(begins.first_on(at))
        rounds.append(sum(limit > 1 for limit in ceases.since(at)))

    assert f"after {fmean(later):.0f} tokens on average and {max(later)} at most" in PAGE
    assert f"after {fmean(rounds):.1f} rounds on average and {max(rounds)} at most" in PAGE
