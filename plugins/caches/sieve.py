"""SIEVE: a hand goes over the entries in the order of admission and takes the first that was not used since it passed.

Zhang et al., NSDI 2024 ("SIEVE is simpler than LRU"). Nothing moves on a hit. It knows no cycle of layers: where all of
a token's experts do not fit, it keeps none of them for the next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from bmoe import Provider, hookimpl
from bmoe.contracts import CachePolicy, ExpertKey, Facts, Options


class Sieve:
    """Entries that the hand has yet to come to, and those that it has passed, each in the order of admission."""

    below_cycle = False

    def __init__(self) -> None:
        self._ahead: dict[ExpertKey, None] = {}
        self._passed: dict[ExpertKey, None] = {}
        self._used: set[ExpertKey] = set()
        self._named: ExpertKey | None = None

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        self._used.update(key for key in keys if key in self._ahead or key in self._passed)

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        self._ahead[key] = None

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        self._named = None
        for key in chain(self._ahead, self._passed):
            if key not in pinned:
                if key not in self._used:
                    self._named = key
                    break
                if self._named is None:
                    self._named = key  # unless one was not used, the hand comes back to this one
        return self._named

    def forget(self, key: ExpertKey, /) -> None:
        if key == self._named:
            self._go_to(key)
        self._ahead.pop(key, None)
        self._passed.pop(key, None)
        self._used.discard(key)

    def _go_to(self, key: ExpertKey) -> None:
        """Move the hand, which clears what it passes."""
        if key in self._used:
            self._used.clear()
        while True:
            if not self._ahead:
                self._ahead, self._passed = self._passed, {}
            first = next(iter(self._ahead), key)
            if first == key:
                return
            del self._ahead[first]
            self._passed[first] = None
            self._used.discard(first)


def _build(options: Options, facts: Facts, /) -> CachePolicy:
    return Sieve()


@hookimpl
def bmoe_caches() -> list[Provider[CachePolicy]]:
    """Return the SIEVE policy."""
    return [Provider("sieve", _build, summary="evicts what was not used since a hand passed it")]
