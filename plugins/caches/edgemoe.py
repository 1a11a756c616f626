"""EdgeMoE's eviction score: the entry with the most layers until its turn for each of its uses goes first.

Yi et al., arXiv 2308.14352. The formula that it prints, -f / ((S - i + I) mod S), contradicts its prose: it gives up
what comes next and keeps what just ran. ``formula = "turn"`` is the prose: d / f with d layers until the turn comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import CachePolicy, ExpertKey, Facts, Options
from bmoe_plugins.caches._ranked import Ranked


class EdgeMoeOptions(Options):
    """Options of ``edgemoe``."""

    formula: Literal["turn", "literal"] = Field("turn", description="The prose's score, or the printed one.")


class EdgeMoe:
    """Counts all uses since the start, by layer; in a layer the least used is the candidate."""

    below_cycle = True

    def __init__(self, formula: str) -> None:
        self._literal = formula == "literal"
        self._uses: dict[ExpertKey, int] = {}
        self._groups: dict[int, Ranked] = {}
        self._now = 0

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        self._now = keys[0] >> 16
        for key in keys:
            uses = self._uses[key] = self._uses.get(key, 0) + 1
            ranked = self._groups.setdefault(key >> 16, Ranked())
            if key in ranked:
                ranked.set(key, uses)

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        self._groups.setdefault(key >> 16, Ranked()).set(key, self._uses.get(key, 0))

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        order = sorted(self._groups)
        here = order.index(self._now) if self._now in self._groups else 0
        most, found = 0.0, None
        for index, group in enumerate(order):
            least = self._groups[group].least(pinned)
            if least is not None:
                score = self._score((index - here) % len(order) or len(order), len(order), least[0])
                if found is None or score > most:
                    most, found = score, least[1]
        return found

    def _score(self, turn: int, layers: int, uses: int) -> float:
        if not self._literal:
            return turn / uses if uses else float(layers + turn)
        return -uses / ((layers - turn) % layers or layers)

    def forget(self, key: ExpertKey, /) -> None:
        if key >> 16 in self._groups:
            self._groups[key >> 16].drop(key)


def _build(options: EdgeMoeOptions, facts: Facts, /) -> CachePolicy:
    return EdgeMoe(options.formula)


@hookimpl
def bmoe_caches() -> list[Provider[CachePolicy]]:
    """Return EdgeMoE's policy."""
    return [Provider("edgemoe", _build, EdgeMoeOptions, summary="evicts by layers until the turn over uses")]
