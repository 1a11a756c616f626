"""Bootstrap intervals of a mean over items: how far it would move with other items from where these came from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


def interval(
    totals: Sequence[float], counts: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float, float] | None:
    """The percentile interval of ``sum(totals) / sum(counts)``; None if there are fewer than two items.

    Items are drawn with replacement, each with its own total and count, so the tokens of a document stay together. The
    same seed gives the same interval. Source: Efron, Bootstrap Methods: Another Look at the Jackknife (1979).
    """
    n = len(totals)
    if n != len(counts):
        raise ValueError(f"{n} totals and {len(counts)} counts")
    if n < 2:
        return None
    total, count = np.asarray(totals, np.float64), np.asarray(counts, np.float64)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    for index in range(resamples):
        drawn = rng.integers(n, size=n)
        means[index] = total[drawn].sum() / count[drawn].sum()
    tail = (1 - level) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high)
