"""Decayed use counts: a use counts 1, and half of it ``half_life`` uses of the clock later."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf, log2


class Decayed:
    """Counts by key, kept as logarithms that do not change with time, so that an order by them stays true."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._logs: dict[Hashable, float] = {}
        self._steady = log2(1 - 2 ** (-1 / half_life))

    def use(self, key: Hashable, time: float) -> float:
        """Count one use at ``time``; the new logarithm, which is larger for what is used more."""
        now = time / self._half_life
        before = self._logs.get(key, -inf) - now
        found = self._logs[key] = now + (log2(2**before + 1) if before > -1000 else 0.0)
        return found

    def start(self, key: Hashable, chance: float) -> None:
        """Begin, at time 0, with the count of what was used in this share of the times before."""
        self._logs[key] = log2(min(1.0, max(1e-9, chance))) - self._steady

    def log(self, key: Hashable) -> float:
        """The logarithm of a key's count; -inf for one that was never used."""
        return self._logs.get(key, -inf)

    def chance(self, log: float, time: float) -> float:
        """Of a count as the share of the times until ``time`` that were uses: 0 to 1, 1 for a use at every time."""
        return min(1.0, 2 ** max(-1000.0, log - time / self._half_life + self._steady))
