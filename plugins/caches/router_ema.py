"""Expected next use by what the router gave: as ``next-use``, but near misses count too.

Own. The chance p that a layer's turn uses an expert is the mean of two moving averages: of its uses, which is slow, and
of its share of the router's probabilities, which is fast and knows of experts that were nearly chosen. The entry whose
next use is furthest away goes first: the distance of its layer + layers * (1/p - 1).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import CachePolicy, ExpertKey, Facts, Options, RoutingEvent

if TYPE_CHECKING:
    import numpy as np


class RouterEmaOptions(Options):
    """Options of ``router-ema``."""

    half_life: float = Field(8, gt=0, le=1e6, description="Tokens after which a use counts half.")
    near_half_life: float = Field(2, gt=0, le=1e6, description="Tokens after which a probability counts half.")
    near: float = Field(0.5, ge=0, le=1, description="Weight of the probabilities beside the uses.")


class RouterEma:
    """``_chances``: expert by expert, per bank; ``_orders``: what is resident as (-chance, -key), the least last."""

    below_cycle = True
    wants = frozenset({"probs"})

    def __init__(self, options: RouterEmaOptions, experts: dict[int, int]) -> None:
        self._options, self._experts = options, experts
        self._averages: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._chances: dict[int, list[float]] = {}
        self._resident: dict[int, set[ExpertKey]] = {}
        self._orders: dict[int, list[tuple[float, int]]] = {}
        self._banks: list[int] = []
        self._now = 0

    def observe(self, event: RoutingEvent, /) -> None:
        import numpy as np

        tokens, bank, o = len(event.ids), event.layer << 8 | event.bank, self._options
        count = self._experts.get(bank, 0)
        if not tokens or not count:
            return
        uses, near = self._averages.setdefault(bank, (np.zeros(count), np.zeros(count)))
        used = np.bincount(event.ids.ravel(), minlength=count)[:count] / tokens
        uses += (1 - 2 ** (-tokens / o.half_life)) * (used - uses)
        shares = used if event.probs is None else _shares(event.probs, event.ids.shape[1], used)
        near += (1 - 2 ** (-tokens / o.near_half_life)) * (shares - near)
        self._chances[bank] = ((1 - o.near) * uses + o.near * near).tolist()
        self._orders.pop(bank, None)

    def remember(self, chances: Mapping[ExpertKey, float], /) -> None:
        import numpy as np

        for bank, count in self._experts.items():
            before = [min(1.0, chances.get(bank << 16 | expert, 0.0)) for expert in range(count)]
            self._averages[bank], self._chances[bank] = (np.array(before), np.array(before)), before

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        self._now = bank = keys[0] >> 16
        if bank not in self._resident:
            self._resident[bank] = set()
            insort(self._banks, bank)

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        bank = key >> 16
        if bank not in self._resident:
            self._resident[bank] = set()
            insort(self._banks, bank)
        self._resident[bank].add(key)
        if bank in self._orders:
            insort(self._orders[bank], (-self._chance(key), -key))

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        banks, furthest, found = self._banks, 0.0, None
        here = bisect_left(banks, self._now)
        for index, bank in enumerate(banks):
            least = self._least(bank, pinned)
            if least is not None:
                away = (index - here - 1) % len(banks) + 1 + len(banks) * (1 / max(-least[0], 1e-9) - 1)
                if away > furthest:
                    furthest, found = away, -least[1]
        return found

    def forget(self, key: ExpertKey, /) -> None:
        self._resident.get(key >> 16, set()).discard(key)
        order = self._orders.get(key >> 16)
        if order and order[-1][1] == -key:
            order.pop()

    def _chance(self, key: ExpertKey) -> float:
        chances = self._chances.get(key >> 16)
        return chances[key & 0xFFFF] if chances else 0.0

    def _least(self, bank: int, pinned: Collection[ExpertKey]) -> tuple[float, int] | None:
        resident, order = self._resident[bank], self._orders.get(bank)
        if order is None:
            order = self._orders[bank] = sorted((-self._chance(key), -key) for key in resident)
        return next((each for each in reversed(order) if -each[1] in resident and -each[1] not in pinned), None)


def _shares(probs: np.ndarray, n_used: int, instead: np.ndarray) -> np.ndarray:
    """Per expert, how much of one of ``n_used`` uses was its own, 0 to 1; ``instead`` if that is no number."""
    import numpy as np

    with np.errstate(all="ignore"):
        each = probs.astype(np.float64)
        shares: np.ndarray = np.minimum(1, n_used * each / each.sum(axis=1, keepdims=True)).mean(axis=0)
    return shares if bool((shares >= 0).all()) else instead


def _build(options: RouterEmaOptions, facts: Facts, /) -> CachePolicy:
    return RouterEma(options, {bank.layer << 8 | bank.bank: bank.n_expert for bank in facts.model.banks})


@hookimpl
def bmoe_caches() -> list[Provider[CachePolicy]]:
    """Return the policy that looks at the router."""
    summary = "evicts what is expected to be used latest, by uses and the router's probabilities"
    return [Provider("router-ema", _build, RouterEmaOptions, summary=summary)]
