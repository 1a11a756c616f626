"""Expected next use: the entry whose next use is furthest away, as far as its layer and its uses tell, goes first.

Own. A layer's turn comes at a known distance, in layers; then one of its experts is used with the chance p that its
decayed use count gives, or a token later, and so on: distance + layers * (1/p - 1). There is one budget for all layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import CachePolicy, ExpertKey, Facts, Options
from bmoe_plugins.caches._counts import Decayed
from bmoe_plugins.caches._ranked import Ranked


class NextUseOptions(Options):
    """Options of ``next-use``."""

    half_life: float = Field(8, gt=0, le=1e6, description="Tokens after which a use counts half.")


class NextUse:
    """In a layer the least used entry is the candidate; the candidates of all layers are compared."""

    below_cycle = True

    def __init__(self, half_life: float) -> None:
        self._counts = Decayed(half_life)
        self._groups: dict[int, Ranked] = {}
        self._times: dict[int, int] = {}
        self._now = 0

    def remember(self, chances: Mapping[ExpertKey, float], /) -> None:
        for key, chance in chances.items():
            self._counts.start(key, chance)

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        self._now = group = keys[0] >> 16
        ranked = self._groups.setdefault(group, Ranked())
        time = self._times[group] = self._times.get(group, 0) + 1
        for key in keys:
            log = self._counts.use(key, time)
            if key in ranked:
                ranked.set(key, log)

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        self._groups.setdefault(key >> 16, Ranked()).set(key, self._counts.log(key))

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        order = sorted(self._groups)
        layers, here = len(order), order.index(self._now) if self._now in self._groups else 0
        furthest, found = 0.0, None
        for index, group in enumerate(order):
            least = self._groups[group].least(pinned)
            if least is not None:
                chance = self._counts.chance(least[0], self._times.get(group, 0))
                away = (index - here - 1) % layers + 1 + layers * (1 / max(chance, 1e-9) - 1)
                if away > furthest:
                    furthest, found = away, least[1]
        return found

    def forget(self, key: ExpertKey, /) -> None:
        if key >> 16 in self._groups:
            self._groups[key >> 16].drop(key)


def _build(options: NextUseOptions, facts: Facts, /) -> CachePolicy:
    return NextUse(options.half_life)


@hookimpl
def bmoe_caches() -> list[Provider[CachePolicy]]:
    """Return the policy of the expected next use."""
    return [Provider("next-use", _build, NextUseOptions, summary="evicts what is expected to be used latest")]
