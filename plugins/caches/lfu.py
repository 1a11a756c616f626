"""Least frequently used: the entry with the fewest uses goes first, of equal ones the one whose last is longest ago.

What is not resident keeps its count. Forgetting it would make this LRU where a token's experts do not all fit: whatever
was read anew would have one use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import CachePolicy, ExpertKey, Facts, Options
from bmoe_plugins.caches._ranked import Ranked


class Lfu:
    """Uses since the start, and the time of the last one."""

    below_cycle = True

    def __init__(self) -> None:
        self._ranked, self._time = Ranked(), 0
        self._uses: dict[ExpertKey, tuple[int, int]] = {}

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        for key in keys:
            self._time += 1
            uses, _ = self._uses.get(key, (0, 0))
            self._uses[key] = uses + 1, self._time
            if key in self._ranked:
                self._ranked.set(key, self._uses[key])

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        self._ranked.set(key, self._uses.get(key, (0, 0)))

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        least = self._ranked.least(pinned)
        return least and least[1]

    def forget(self, key: ExpertKey, /) -> None:
        self._ranked.drop(key)


def _build(options: Options, facts: Facts, /) -> CachePolicy:
    return Lfu()


@hookimpl
def bmoe_caches() -> list[Provider[CachePolicy]]:
    """Return the LFU policy."""
    return [Provider("lfu", _build, summary="evicts what was used least often")]
