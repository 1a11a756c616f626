"""Exponentially decayed frequency: the entry that was used least goes first, where older uses count less.

LRFU of Lee et al. 2001 ("LRFU: a spectrum of policies"), with a half-life in tokens. What is not resident keeps its
count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import CachePolicy, ExpertKey, Facts, Options
from bmoe_plugins.caches._counts import Decayed
from bmoe_plugins.caches._ranked import Ranked


class DecayOptions(Options):
    """Options of ``decay``."""

    half_life: float = Field(8, gt=0, le=1e6, description="Tokens after which a use counts half.")


class Decay:
    """The clock of a layer goes on with each of its routings."""

    below_cycle = True

    def __init__(self, half_life: float) -> None:
        self._counts, self._ranked = Decayed(half_life), Ranked()
        self._times: dict[int, int] = {}

    def remember(self, chances: Mapping[ExpertKey, float], /) -> None:
        for key, chance in chances.items():
            self._counts.start(key, chance)

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        group = keys[0] >> 16
        time = self._times[group] = self._times.get(group, 0) + 1
        for key in keys:
            log = self._counts.use(key, time)
            if key in self._ranked:
                self._ranked.set(key, log)

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        self._ranked.set(key, self._counts.log(key))

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        least = self._ranked.least(pinned)
        return least and least[1]

    def forget(self, key: ExpertKey, /) -> None:
        self._ranked.drop(key)


def _build(options: DecayOptions, facts: Facts, /) -> CachePolicy:
    return Decay(options.half_life)


@hookimpl
def bmoe_caches() -> list[Provider[CachePolicy]]:
    """Return the policy of decayed frequency."""
    return [Provider("decay", _build, DecayOptions, summary="evicts what was used least, where older uses count less")]
