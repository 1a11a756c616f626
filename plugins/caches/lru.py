"""Least recently used: the entry whose last use is longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import CachePolicy, ExpertKey, Facts, Options


class Lru:
    """Resident entries from coldest to most recently used; a speculative entry starts at the cold end."""

    below_cycle = False

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()
        self._to_end = self._order.move_to_end
        self._used: Sequence[ExpertKey] = ()

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        order, to_end = self._order, self._to_end
        for key in keys:
            if key in order:
                to_end(key)
        self._used = keys

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        order, to_end, used = self._order, self._to_end, self._used
        order[key] = None
        to_end(key, not cold)
        if not cold and key in used:
            # It was used in its place among those of its routing, and not after those that were here already.
            for later in used[used.index(key) + 1 :]:
                if later in order:
                    to_end(later)

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        for key in self._order:
            if key not in pinned:
                return key
        return None

    def forget(self, key: ExpertKey, /) -> None:
        self._order.pop(key, None)


def _build(options: Options, facts: Facts, /) -> CachePolicy:
    return Lru()


@hookimpl
def bmoe_caches() -> list[Provider[CachePolicy]]:
    """Return the LRU policy."""
    return [Provider("lru", _build, summary="evicts what was used longest ago")]
