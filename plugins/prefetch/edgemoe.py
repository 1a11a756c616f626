"""EdgeMoE's prefetcher: the next layer's experts by those of the two layers before it, learnt while it runs.

Source: Yi et al., arXiv 2308.14352, whose table is asked by the exact experts of both layers (``order = "exact"``).
That repeats in models that use one or two experts; with eight of 128 it hardly ever does, so by default each of those
experts speaks for itself: the sum over them of log P(e | e', layer), smoothed by how often e is used at all (own).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import BankFacts, ExpertKey, Facts, Options, Prefetcher, RoutingEvent
from bmoe_plugins.prefetch._entries import by_layer, entries

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROWS = 64
"""Of a prompt's piece the last tokens are learnt from."""
_MOST = (1 << 16) - 1 - _ROWS
"""Counts are halved before they would not fit into 16 bits; a token adds one to a pair."""
_KEYS = 1 << 15
"""Exact keys that are kept; the oldest goes first."""
_BACK_OFF = 4.0
"""Uses that the frequency counts for, beside what was counted for a pair."""

_Ids = tuple[int, ...]


class EdgeMoEOptions(Options):
    """How it learns, and how much it asks for."""

    order: Literal["factorised", "exact"] = Field(
        default="factorised", description="each expert before speaks for itself, or only all of them together"
    )
    reads: int | None = Field(default=None, ge=1, le=64, description="best ranked to read; default: as many as used")


class _Frequency:
    """How often a layer's experts were used."""

    def __init__(self, n_expert: int) -> None:
        self.uses = np.zeros(n_expert, dtype=np.int64)

    def share(self) -> NDArray[np.float64]:
        """Of each expert, none of them 0; sums to 1."""
        smooth: NDArray[np.float64] = (self.uses + 1) / (self.uses.sum() + len(self.uses))
        return smooth


class _Pairs:
    """How often each expert was used after each one of an earlier layer: uint16 [before, after]."""

    def __init__(self, before: int, after: int) -> None:
        self.counts = np.zeros((before, after), dtype=np.uint16)
        self.rows = np.zeros(before, dtype=np.int64)

    def learn(self, before: NDArray[np.int32], after: NDArray[np.int32]) -> None:
        """Ids int32 [n_tokens, n_used] of both layers."""
        if self.rows[before].max() > _MOST:
            self.counts >>= 1
            self.rows >>= 1
        np.add.at(self.counts, (before[:, :, None], after[:, None, :]), 1)
        np.add.at(self.rows, before, 1)

    def evidence(self, before: NDArray[np.int32], share: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of log P(e | e') over the experts ``before``, [n_expert]."""
        likely = (self.counts[before] + _BACK_OFF * share) / (self.rows[before, None] + _BACK_OFF)
        logs: NDArray[np.float64] = np.log(likely).sum(axis=0)
        return logs


class EdgeMoE:
    """Learns from every token and suggests for the next layer; the layer before the first is the last one."""

    wants = frozenset({"topk"})

    def __init__(self, banks: Sequence[BankFacts], exact: bool, reads: int | None) -> None:
        self._banks = by_layer(banks)
        self._layers = list(self._banks)
        self._place = {layer: place for place, layer in enumerate(self._layers)}
        self._exact, self._reads = exact, reads
        self._back = min(2, len(self._layers) - 1)
        counts = {layer: found[0].n_expert for layer, found in self._banks.items()}
        self._often = {layer: _Frequency(count) for layer, count in counts.items()}
        self._pairs: dict[tuple[int, int], _Pairs] = {}
        for layer in self._layers if not exact else ():
            for back in range(1, self._back + 1):
                self._pairs[layer, back] = _Pairs(counts[self._before(layer, back)], counts[layer])
        self._table: dict[tuple[int, tuple[_Ids, ...]], NDArray[np.int64]] = {}
        self._last: dict[int, NDArray[np.int32]] = {}

    def observe(self, event: RoutingEvent, /) -> None:
        if event.bank or not len(event.ids):
            return
        layer, ids = event.layer, event.ids[-_ROWS:].copy()
        np.add.at(self._often[layer].uses, ids, 1)
        previous = [self._last.get(self._before(layer, back)) for back in range(1, self._back + 1)]
        rows = min([len(ids), *(len(found) for found in previous if found is not None)])
        if previous and all(found is not None for found in previous):
            known = [found[-rows:] for found in previous if found is not None]
            if self._exact:
                self._note(layer, known, ids[-rows:])
            else:
                for back, found in enumerate(known, 1):
                    self._pairs[layer, back].learn(found, ids[-rows:])
        self._last[layer] = ids

    def suggest(self, layer: int, /) -> Sequence[ExpertKey]:
        if not self._back:
            return ()
        target = self._layers[(self._place[layer] + 1) % len(self._layers)]
        known = [self._last.get(self._before(target, back)) for back in range(1, self._back + 1)]
        before = [found[-1] for found in known if found is not None]
        if len(before) < self._back:
            return ()
        scores = self._often[target].share()
        if self._exact:
            scores = scores + self._table.get((target, _key(before)), 0)  # one use outweighs any frequency
        else:
            each = [self._pairs[target, back].evidence(ids, scores) for back, ids in enumerate(before, 1)]
            scores = np.sum(each, axis=0)
        banks = self._banks[target]
        count = min(banks[0].n_used if self._reads is None else self._reads, banks[0].n_expert)
        return entries(banks, np.argsort(-scores, kind="stable")[:count].tolist())

    def _before(self, layer: int, back: int) -> int:
        return self._layers[(self._place[layer] - back) % len(self._layers)]

    def _note(self, layer: int, before: Sequence[NDArray[np.int32]], ids: NDArray[np.int32]) -> None:
        """Into the table of exact keys."""
        for row, used in enumerate(ids):
            key = layer, _key([found[row] for found in before])
            uses = self._table.pop(key, None)
            if uses is None:
                uses = np.zeros(len(self._often[layer].uses), dtype=np.int64)
            uses[used] += 1
            self._table[key] = uses
            if len(self._table) > _KEYS:
                del self._table[next(iter(self._table))]


def _key(before: Sequence[NDArray[np.int32]]) -> tuple[_Ids, ...]:
    return tuple(tuple(sorted(ids.tolist())) for ids in before)


def _build(options: EdgeMoEOptions, facts: Facts, /) -> Prefetcher:
    return EdgeMoE(facts.model.banks, options.order == "exact", options.reads)


@hookimpl
def bmoe_prefetchers() -> list[Provider[Prefetcher]]:
    """Return EdgeMoE's prefetcher."""
    summary = "reads what the next layer mostly uses after the experts of the two layers before"
    return [Provider("edgemoe", _build, EdgeMoEOptions, summary=summary)]
