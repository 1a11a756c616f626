"""No ranking at all: the longest resident entry goes first. The policy of a budget of 0, where nothing is kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import CachePolicy, ExpertKey, Facts, Options


class NoPolicy:
    """First admitted, first out; use is not looked at."""

    below_cycle = False

    def __init__(self) -> None:
        self._admitted: OrderedDict[ExpertKey, None] = OrderedDict()  # a dict slows down when emptied from its front

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        """Use does not count."""

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        self._admitted[key] = None

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        for key in self._admitted:
            if key not in pinned:
                return key
        return None

    def forget(self, key: ExpertKey, /) -> None:
        self._admitted.pop(key, None)


def _build(options: Options, facts: Facts, /) -> CachePolicy:
    return NoPolicy()


@hookimpl
def bmoe_caches() -> list[Provider[CachePolicy]]:
    """Return the policy that does not rank."""
    return [Provider("none", _build, summary="keeps no ranking; for a budget of 0")]
