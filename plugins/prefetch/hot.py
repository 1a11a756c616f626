"""Hot prefetch: the coming layers will use what they use most, counted by decayed uses; own.

A heat file (``cache.heat``) makes it begin with what earlier runs used. It knows nothing of the token: what a cache
that counts uses has given up is seldom used soon, so that it helps most beside one that does not count, as ``lru``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import BankFacts, ExpertKey, Facts, Options, Prefetcher, RoutingEvent, key_parts
from bmoe_plugins.prefetch._entries import by_layer, entries

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROWS = 64
"""Of a prompt's piece the last tokens are counted."""


class HotOptions(Options):
    """What is counted as hot, and how far it looks."""

    half_life: float = Field(default=32, gt=0, le=1e6, description="tokens after which a use counts half")
    least: float = Field(default=0.25, ge=0, le=1, description="share of the tokens that have to use an expert")
    depth: int = Field(default=1, ge=1, le=8, description="layers ahead for which experts are suggested")


class Hot:
    """Chances [n_expert] of each layer's experts: of all tokens, later ones count more, those that used the expert."""

    wants = frozenset({"topk"})

    def __init__(self, banks: Sequence[BankFacts], half_life: float, least: float, depth: int) -> None:
        self._banks = by_layer(banks)
        self._fade, self._least = 2 ** (-1 / half_life), least
        self._chances = {layer: np.zeros(found[0].n_expert) for layer, found in self._banks.items()}
        self._tokens = dict.fromkeys(self._banks, 0.0)
        layers = list(self._banks)
        self._next = {
            layer: [layers[(index + step) % len(layers)] for step in range(1, min(depth, len(layers) - 1) + 1)]
            for index, layer in enumerate(layers)
        }

    def remember(self, chances: Mapping[ExpertKey, float], /) -> None:
        for key, chance in chances.items():
            layer, bank, expert = key_parts(key)
            if bank == 0:
                self._chances[layer][expert] = chance
                self._tokens[layer] = np.inf

    def observe(self, event: RoutingEvent, /) -> None:
        if event.bank:
            return
        chances = self._chances[event.layer]
        for used in event.ids[-_ROWS:]:
            self._tokens[event.layer] += 1
            weight = max(1 - self._fade, 1 / self._tokens[event.layer])  # the first tokens count alike
            chances *= 1 - weight
            chances[used] += weight

    def suggest(self, layer: int, /) -> Sequence[ExpertKey]:
        return [key for coming in self._next[layer] for key in entries(self._banks[coming], self._hottest(coming))]

    def _hottest(self, layer: int) -> list[int]:
        """All that are hot enough, the hottest first; which of them are in memory is known elsewhere."""
        chances: NDArray[np.float64] = self._chances[layer]
        order = np.argsort(-chances, kind="stable")
        hot: list[int] = order[: np.count_nonzero((chances >= self._least) & (chances > 0))].tolist()
        return hot


def _build(options: HotOptions, facts: Facts, /) -> Prefetcher:
    return Hot(facts.model.banks, options.half_life, options.least, options.depth)


@hookimpl
def bmoe_prefetchers() -> list[Provider[Prefetcher]]:
    """Return the prefetcher of hot experts."""
    return [Provider("hot", _build, HotOptions, summary="reads what the next layers use most, by decayed use counts")]
