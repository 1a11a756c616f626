"""Is one side faster than another: a ratio, its interval, and a verdict only if chance is an unlikely explanation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bmoe.evaluate.bootstrap import interval

FALSE_VERDICTS = 0.05
"""How often a bench of sides that are equal may say that one of them is faster."""

RESAMPLES = 10_000
_NORMAL = statistics.NormalDist()


@dataclass(frozen=True, slots=True)
class Comparison:
    """``ratio`` of speeds, side over baseline (2 = twice as fast), its interval at ``level``, and over how many pairs.

    ``verdict`` is ``faster``, ``slower`` or None: not shown. Fewer pairs than ``pairs_needed`` have neither an interval
    nor a verdict.
    """

    ratio: float
    low: float | None
    high: float | None
    level: float
    pairs: int
    pairs_needed: int
    verdict: str | None


def compare(
    baseline: Sequence[float], side: Sequence[float], *, comparisons: int = 1, seed: int = 0, resamples: int = RESAMPLES
) -> Comparison:
    """Compare seconds per token that were measured next to each other, pair by pair.

    The ratio is the geometric mean of those of the pairs, so that swapping the sides gives its inverse. The interval is
    a bootstrap over pairs; among several ``comparisons`` each has its share of the errors that are allowed.
    """
    if len(baseline) != len(side) or not baseline:
        raise ValueError(f"{len(baseline)} and {len(side)} values make no pairs")
    logs = [math.log(first / second) for first, second in zip(baseline, side, strict=True)]
    middle, level = statistics.fmean(logs), 1 - FALSE_VERDICTS / comparisons
    low, high, needed, verdict = None, None, pairs_needed(comparisons), None
    if len(logs) >= needed:
        found = interval(logs, [1.0] * len(logs), seed=seed, resamples=resamples, level=level)
        assert found is not None
        factor = widening(len(logs), level)
        low, high = (math.exp(middle + factor * (end - middle)) for end in found)
        verdict = "faster" if low > 1 else "slower" if high < 1 else None
    return Comparison(math.exp(middle), low, high, level, len(logs), needed, verdict)


def pairs_needed(comparisons: int = 1) -> int:
    """The fewest pairs that may end in a verdict.

    Of equal sides one is ahead in all of ``n`` pairs with a chance of ``2 ** (1 - n)``. With fewer pairs than this
    returns, that alone is more than the errors that are allowed.
    """
    return 1 + math.ceil(-math.log2(FALSE_VERDICTS / comparisons))


def widening(n: int, level: float) -> float:
    """By how much a percentile interval over ``n`` values is widened about its middle to keep what ``level`` promises.

    Resampled means of few values vary too little, and their tails lack those of Student's t: by the square root of
    ``n / (n - 1)``, and by the quantile of t over that of the normal distribution. Source: Hesterberg, What Teachers
    Should Know About the Bootstrap (2015), which has the two factors; there they change the level, and then a level
    that is shared by several comparisons asks for tails that so few values do not have.
    """
    p = (1 + level) / 2
    return math.sqrt(n / (n - 1)) * student_t(p, n - 1) / _NORMAL.inv_cdf(p)


def student_t(p: float, degrees: int) -> float:
    """The quantile ``p`` of Student's t with that many degrees of freedom.

    By the expansion in Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.5; from 5 degrees on it
    is right to 0.01 at the levels that are used here.
    """
    x = _NORMAL.inv_cdf(p)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / math.pow(degrees, power) for power, term in enumerate(terms, 1))
