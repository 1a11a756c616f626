"""Interleaved runs and what may be concluded from them: medians, spread, and an interval for a ratio."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Ratio:
    """The median of pairwise ratios, its 95 % bootstrap interval, and the spread of each side (quartiles)."""

    ratio: float
    low: float
    high: float
    pairs: int
    first: tuple[float, float, float]
    second: tuple[float, float, float]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.ratio:.3f} (95 % interval {self.low:.3f}-{self.high:.3f}, {self.pairs} pairs)"


def interleave(first: Callable[[], float], second: Callable[[], float], pairs: int) -> Ratio:
    """Measure both in turn, A B B A A B …, so that a drift of the machine hits both; the ratio is first / second."""
    a: list[float] = []
    b: list[float] = []
    for index in range(pairs):
        if index % 2:
            b.append(second())
            a.append(first())
        else:
            a.append(first())
            b.append(second())
    return compare(a, b)


def compare(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """Ratios of values measured next to each other."""
    ratios = [x / y for x, y in zip(first, second, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    low, high = medians[100], medians[3899]
    return Ratio(statistics.median(ratios), low, high, len(ratios), quartiles(first), quartiles(second))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
