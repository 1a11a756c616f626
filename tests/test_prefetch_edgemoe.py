"""The edgemoe prefetcher against a plain model of its rule, and on routings that depend on the layer before."""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from bmoe.contracts import BatchContext, RoutingEvent, key_parts
from bmoe.testing import traces
from bmoe.testing.caches import cache_facts
from bmoe.testing.load import load_provider

LAYERS, EXPERTS = traces.LAYERS, traces.EXPERTS


def build(**options: Any) -> Any:
    provider = load_provider("prefetch", "bmoe", "edgemoe")
    return provider.build(provider.options(**options), cache_facts(64))


def event(layer: int, *rows: list[int]) -> RoutingEvent:
    return RoutingEvent(layer, 0, BatchContext("decode", tuple(range(len(rows)))), np.array(rows, dtype=np.int32))


def experts(edgemoe: Any, layer: int) -> list[int]:
    keys = [key_parts(key) for key in edgemoe.suggest(layer)]
    assert {key.layer for key in keys} <= {(layer + 1) % LAYERS}
    return [key.expert for key in keys]


class Naive:
    """The rule as a formula: the sum of log((n(e', e) + 4 f(e)) / (n(e') + 4)) over both layers before."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[int, int, int, int]] = Counter()
        self.rows: Counter[tuple[int, int, int]] = Counter()
        self.uses: Counter[tuple[int, int]] = Counter()
        self.last: dict[int, list[int]] = {}

    def observe(self, layer: int, ids: list[int]) -> None:
        self.uses.update((layer, e) for e in ids)
        before = [self.last.get((layer - back) % LAYERS) for back in (1, 2)]
        if None not in before:
            for back, found in enumerate(before, 1):
                for e in found or ():
                    self.rows[layer, back, e] += 1
                    self.pairs.update((layer, back, e, f) for f in ids)
        self.last[layer] = ids

    def scores(self, layer: int) -> list[float]:
        target = (layer + 1) % LAYERS
        total = sum(self.uses[target, e] for e in range(EXPERTS))
        often = [(self.uses[target, e] + 1) / (total + EXPERTS) for e in range(EXPERTS)]
        return [
            sum(
                math.log((self.pairs[target, back, b, e] + 4 * often[e]) / (self.rows[target, back, b] + 4))
                for back in (1, 2)
                for b in self.last[(target - back) % LAYERS]
            )
            for e in range(EXPERTS)
        ]


@pytest.mark.parametrize("seed", range(3))
def test_it_ranks_as_the_formula_does(seed: int) -> None:
    edgemoe, naive, draw = build(reads=6), Naive(), Random(seed)
    for _ in range(30):
        for layer in range(LAYERS):
            ids = draw.sample(range(12), 4)
            edgemoe.observe(event(layer, ids))
            naive.observe(layer, ids)
            if len(naive.last) == LAYERS:
                scores = naive.scores(layer)
                found = experts(edgemoe, layer)
                assert [round(scores[e], 9) for e in found] == [round(s, 9) for s in sorted(scores, reverse=True)[:6]]


@pytest.mark.parametrize("order", ["factorised", "exact"])
def test_what_follows_from_the_layers_before_is_found(order: str) -> None:
    """Each layer's experts are those of the one before, moved; the frequency alone says nothing."""
    edgemoe, draw = build(order=order, reads=2), Random(0)
    right = asked = 0
    expected: list[int] = []
    for token in range(400):
        start = draw.randrange(8)
        for layer in range(LAYERS):
            used = [(start + layer) % 8, 8 + (start + layer) % 8]
            if token > 300 and layer > 1:
                right += len(set(expected) & set(used))
                asked += 2
            edgemoe.observe(event(layer, used))
            expected = experts(edgemoe, layer)

    assert right > 0.95 * asked


def test_the_tokens_of_a_prompt_are_learnt_from_row_by_row() -> None:
    one, many = build(), build()
    draw = Random(5)
    rows = [[draw.sample(range(EXPERTS), 4) for _ in range(5)] for _ in range(LAYERS)]
    for layer in range(LAYERS):
        many.observe(event(layer, *rows[layer]))
    for token in range(5):
        one._last.clear()
        for layer in range(LAYERS):
            one.observe(event(layer, rows[layer][token]))

    for layer in range(LAYERS - 1):
        assert experts(one, layer) == experts(many, layer)


def test_a_last_layer_that_was_computed_for_fewer_tokens_is_learnt_from_too() -> None:
    edgemoe = build()
    for layer in range(LAYERS):
        rows = [[1, 2, 3, 4], [5, 6, 7, 8]] if layer < LAYERS - 1 else [[9, 10, 11, 12]]
        edgemoe.observe(event(layer, *rows))
    for layer in range(LAYERS - 1):
        edgemoe.observe(event(layer, [5, 6, 7, 8]))

    assert set(experts(edgemoe, LAYERS - 2)) == {9, 10, 11, 12}


def test_counts_are_halved_before_they_overflow() -> None:
    edgemoe = build(reads=4)
    rows = [[1, 2, 3, 4]] * 64
    for _ in range(1100):
        for layer in range(3):
            edgemoe.observe(event(layer, *rows))

    assert edgemoe._pairs[2, 1].counts.max() <= 65535
    assert edgemoe._pairs[2, 1].rows.max() <= 65535
    assert set(experts(edgemoe, 1)) == {1, 2, 3, 4}


def test_the_table_of_exact_keys_is_bounded(monkeypatch) -> None:
    import bmoe_plugins.prefetch.edgemoe as module

    monkeypatch.setattr(module, "_KEYS", 10)
    edgemoe, draw = build(order="exact"), Random(0)
    for _ in range(20):
        for layer in range(LAYERS):
            edgemoe.observe(event(layer, draw.sample(range(EXPERTS), 4)))

    assert len(edgemoe._table) == 10
