"""The hit rate that a cache will have, from routing that was recorded with real weights.

``hit_curve.json`` has the curves and says where they are from; ``scripts/make_hit_curve.py`` made it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby, pairwise

_LRU = "lru"
_REACH = 1.5
"""A trace says nothing of a model that uses more than this many times the experts that it was recorded with, unless
there is no other."""


@dataclass(frozen=True, slots=True)
class HitRate:
    """What to expect, between the ``low`` and the ``high`` of the traces, and which ones they are."""

    expected: float
    low: float
    high: float
    why: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A policy's hit rates at ``shares`` of all experts, of a model with ``used`` of ``experts`` per token and layer.

    ``models`` are the only ones that it stands for, by the name in the file; of any name if there are none.
    """

    policy: str
    trace: str
    experts: int
    used: int
    models: tuple[str, ...]
    shares: tuple[float, ...]
    hit_rates: tuple[float, ...]

    def at(self, share: float) -> float:
        """The hit rate with ``share`` of all experts in memory.

        The traces that stand for any model are short: many of their misses are first uses, which a longer run has
        behind it. From a half on their curves go straight to 1, which is what holding all experts gives.
        """
        points = [(0.0, 0.0)]
        points += [(x, y) for x, y in zip(self.shares, self.hit_rates, strict=True) if x <= 0.5 or self.models]
        points.append((1.0, 1.0))
        return _between(points, share)


@functools.cache
def reference() -> tuple[Curve, ...]:
    """The curves that come with bmoe."""
    table = json.loads((files("bmoe") / "fit" / "hit_curve.json").read_text(encoding="utf-8"))
    shares = tuple(table["shares"])
    return tuple(
        Curve(
            row["policy"],
            row["trace"],
            row["experts"],
            row["used"],
            tuple(row["models"]),
            shares,
            tuple(row["hit_rates"]),
        )
        for row in table["curves"]
    )


def expected_hits(name: str, experts: int, used: int, share: float, policy: str = _LRU) -> HitRate:
    """The hit rate of a cache that holds ``share`` (0 to 1) of all experts of a model called ``name``.

    A ``policy`` without curves of its own is taken for LRU.
    """
    share = min(max(share, 0.0), 1.0)
    curves = [c for c in reference() if c.policy == policy] or [c for c in reference() if c.policy == _LRU]
    as_lru = curves[0].policy != policy
    if curves[0].policy == _LRU and share * experts < used:
        # below one token's cycle a least recently used entry never comes back in time
        return HitRate(0.0, 0.0, 0.0, "the cache holds less than one token uses")
    own = [curve for curve in curves if name in curve.models]
    if own:
        rate = own[0].at(share)
        return HitRate(rate, rate, rate, "routing recorded with this model" + ", under LRU" * as_lru)
    density = used / experts
    found: dict[str, float] = {}
    families = [(n, list(g)) for n, g in groupby((c for c in curves if not c.models), lambda c: c.trace)]
    within = [f for f in families if density <= _REACH * max(c.used / c.experts for c in f[1])]
    for trace, curves in within or families:
        found[trace] = max(share, _at_density(curves, density, share))
    rates = list(found.values())
    said = f"routing of {', '.join(found)} recorded with real weights" + ", under LRU" * as_lru
    most = max(c.used / c.experts for _, g in families for c in g)
    if density > most:
        said += f"; they use {100 * most:.1f} % of the experts and this model {100 * density:.1f} %, so extrapolated"
    return HitRate(sum(rates) / len(rates), min(rates), max(rates), said)


def _at_density(curves: Sequence[Curve], density: float, share: float) -> float:
    """Between the curves of one trace by the share of experts that a token uses; beyond the last in a straight line."""
    ordered = sorted(curves, key=lambda curve: curve.used)
    # an LRU curve with fewer experts used than this model has is steep near its own cycle: that part says nothing here
    fitting = [c for c in ordered if c.policy != _LRU or share >= c.used / c.experts]
    points = [(curve.used / curve.experts, curve.at(share)) for curve in fitting]
    if not points:
        return 0.0
    if density <= points[-1][0] or len(points) < 2:
        return _between(points, density)
    (x0, y0), (x1, y1) = points[max(0, len(points) - 3)], points[-1]
    slope = min(0.0, (y1 - y0) / (x1 - x0)) if x1 > x0 else 0.0
    return min(max(y1 + slope * (density - x1), 0.0), 1.0)


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """On the line through neighbouring ``points``, ascending in x; beyond an end, that end's value."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 if x <= x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]
