"""ARC: between what was used once and what was used again, with a share that follows what is missed.

Megiddo and Modha, FAST 2003 ("ARC: a self-tuning, low overhead replacement cache"). Both lists are in the order of use;
what left one of them is remembered, and if it comes back that list is given more room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import CachePolicy, ExpertKey, Facts, Options

Order = OrderedDict[ExpertKey, None]


class Arc:
    """Resident are ``_once`` and ``_again``, the others were; ``_target`` is the room of the first."""

    below_cycle = False

    def __init__(self, capacity: int) -> None:
        self._capacity, self._target = max(1, capacity), 0.0
        self._once, self._again, self._once_gone, self._again_gone = Order(), Order(), Order(), Order()

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        once, again = self._once_gone, self._again_gone
        for key in keys:
            if key in self._once or key in self._again:
                self._once.pop(key, None)
                self._again[key] = None
                self._again.move_to_end(key)
            elif key in once:
                self._target = min(self._capacity, self._target + max(1.0, len(again) / len(once)))
            elif key in again:
                self._target = max(0.0, self._target - max(1.0, len(once) / len(again)))

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        known = key in self._once_gone or key in self._again_gone
        for gone in (self._once_gone, self._again_gone):
            gone.pop(key, None)
        order = self._again if known and not cold else self._once
        order[key] = None
        if cold:
            order.move_to_end(key, last=False)

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        first, second = self._once, self._again
        if len(first) <= self._target:
            first, second = second, first
        for order in (first, second):
            for key in order:
                if key not in pinned:
                    return key
        return None

    def forget(self, key: ExpertKey, /) -> None:
        for order, gone in ((self._once, self._once_gone), (self._again, self._again_gone)):
            if key in order:
                del order[key]
                gone[key] = None
        while self._once_gone and len(self._once) + len(self._once_gone) > self._capacity:
            self._once_gone.popitem(last=False)
        while self._again_gone and len(self._once_gone) + len(self._again_gone) > self._capacity:
            self._again_gone.popitem(last=False)


def _build(options: Options, facts: Facts, /) -> CachePolicy:
    return Arc(facts.cache.capacity)


@hookimpl
def bmoe_caches() -> list[Provider[CachePolicy]]:
    """Return the ARC policy."""
    return [Provider("arc", _build, summary="evicts by recency or by frequency, whichever was missed less")]
