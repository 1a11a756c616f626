"""Temporal prefetch: the coming layers will use what they used for the token before.

It is right for about a third of the experts of trained models (BigMoeOnEdge, docs: 38, 36 and 18 % on Qwen3, Gemma and
gpt-oss), most of which a cache holds anyway. It helps where the cache holds little more than one token uses.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from bmoe import Provider, expert_key, hookimpl
from bmoe.contracts import ExpertKey, Facts, Options, Prefetcher, RoutingEvent


class TemporalOptions(Options):
    """How far it looks."""

    depth: int = Field(default=1, ge=1, le=8, description="layers ahead for which experts are suggested")


class Temporal:
    """The experts that each bank used for the last token seen, by layer in the order of the graph."""

    wants = frozenset({"topk"})

    def __init__(self, layers: Sequence[int], depth: int) -> None:
        self._used: dict[tuple[int, int], list[ExpertKey]] = {}
        self._next = {
            layer: [layers[(index + step) % len(layers)] for step in range(1, min(depth, len(layers) - 1) + 1)]
            for index, layer in enumerate(layers)
        }

    def observe(self, event: RoutingEvent, /) -> None:
        if len(event.ids):
            last = event.ids[-1].tolist()
            self._used[event.layer, event.bank] = [expert_key(event.layer, e, event.bank) for e in last]

    def suggest(self, layer: int, /) -> Sequence[ExpertKey]:
        used = self._used
        return [key for coming in self._next[layer] for bank in (0, 1) for key in used.get((coming, bank), ())]


def _build(options: TemporalOptions, facts: Facts, /) -> Prefetcher:
    return Temporal(sorted({bank.layer for bank in facts.model.banks}), options.depth)


@hookimpl
def bmoe_prefetchers() -> list[Provider[Prefetcher]]:
    """Return the temporal prefetcher."""
    summary = "reads what the next layers used for the token before"
    return [Provider("temporal", _build, TemporalOptions, summary=summary)]
