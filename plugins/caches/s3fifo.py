"""S3-FIFO: what was used once leaves early from a small queue, the rest goes round in a main one.

Yang et al., SOSP 2023 ("FIFO queues are all you need for cache eviction"): the small queue has a tenth of the room,
uses are counted up to 3, and what left the small queue is known for a while, so that it comes back into the main one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import CachePolicy, ExpertKey, Facts, Options

_MOST = 3


class S3FifoOptions(Options):
    """Options of ``s3fifo``."""

    small: float = Field(0.1, gt=0, lt=1, description="Share of the entries that the small queue has.")


class S3Fifo:
    """Uses by entry in the order of each queue; ``_gone`` is what left the small one."""

    below_cycle = True

    def __init__(self, capacity: int, small: float) -> None:
        self._share, self._ghosts = max(1, int(small * capacity)), max(1, capacity)
        self._small: dict[ExpertKey, int] = {}
        self._main: dict[ExpertKey, int] = {}
        self._gone: dict[ExpertKey, None] = {}
        self._named: ExpertKey | None = None

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        for key in keys:
            queue = self._small if key in self._small else self._main
            if key in queue:
                queue[key] = min(_MOST, queue[key] + 1)

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        if key in self._gone:
            del self._gone[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        main, found = self._main, None
        if self._takes_small():
            found = next((k for k, uses in self._small.items() if uses < 2 and k not in pinned), None)
            if found is None:
                main = {**main, **{k: 0 for k, uses in self._small.items() if uses >= 2}}
        for queue in (main, self._small):
            found = _least(queue, pinned) if found is None else found
        self._named = found
        return found

    def forget(self, key: ExpertKey, /) -> None:
        if key == self._named:
            self._go_to(key)
        self._small.pop(key, None)
        self._main.pop(key, None)

    def _takes_small(self) -> bool:
        return len(self._small) >= self._share or not self._main

    def _go_to(self, key: ExpertKey) -> None:
        """What comes before ``key`` in the queues goes where its uses send it."""
        for each, uses in list(self._small.items()) if self._takes_small() else ():
            if uses >= 2:
                del self._small[each]
                self._main[each] = 0
            elif each == key:
                break
        if key in self._small:
            self._gone[key] = None
            if len(self._gone) > self._ghosts:
                del self._gone[next(iter(self._gone))]
        while key in self._main:
            first, uses = next(iter(self._main.items()))
            if first == key and not uses:
                break
            del self._main[first]
            self._main[first] = max(0, uses - 1)


def _least(queue: dict[ExpertKey, int], pinned: Collection[ExpertKey]) -> ExpertKey | None:
    """The entry that goes first if all go round in turn, each time with one use less."""
    found, least = None, _MOST + 1
    for key, uses in queue.items():
        if uses < least and key not in pinned:
            found, least = key, uses
            if not uses:
                break
    return found


def _build(options: S3FifoOptions, facts: Facts, /) -> CachePolicy:
    return S3Fifo(facts.cache.capacity, options.small)


@hookimpl
def bmoe_caches() -> list[Provider[CachePolicy]]:
    """Return the S3-FIFO policy."""
    return [Provider("s3fifo", _build, S3FifoOptions, summary="evicts early what was used only once")]
