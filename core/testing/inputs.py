"""Events for prefetchers without a decode: random ids, or inputs with the ids that a tiny model's routers give them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bmoe.contracts import BatchContext, Facts, RoutingEvent
from bmoe.layout import read_model
from bmoe.registry import load_registry
from bmoe.routers import Router, read_routers
from bmoe.synth import SHAPES
from bmoe.testing import traces
from bmoe.testing.caches import cache_facts
from bmoe.testing.models import TinyModels

_USED = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """One routing: ids int32 [n_tokens, 3], and the router's input, float32 [n_tokens, n_embd], if there is one."""

    layer: int
    ids: np.ndarray
    x: np.ndarray | None = None

    def copy(self) -> Seen:
        """With arrays of its own."""
        return Seen(self.layer, self.ids.copy(), None if self.x is None else self.x.copy())

    def fill(self) -> None:
        """What llama.cpp does to its memory after a call."""
        self.ids.fill(0)
        if self.x is not None:
            self.x.fill(0)

    def event(self) -> RoutingEvent:
        """As an observer sees it."""
        batch = BatchContext("decode", tuple(range(len(self.ids))))
        return RoutingEvent(self.layer, 0, batch, self.ids, activation=self.x)


class Inputs:
    """Seeded routings of a model of ``traces.LAYERS`` layers; ``facts`` and ``routers``, by layer, are that model's."""

    def __init__(self, folder: Path | None) -> None:
        """With a folder, the model is written there, and ids are what its routers choose by the inputs."""
        self.facts: Facts = cache_facts(64)
        self.routers: dict[int, Router] = {}
        if folder is not None:
            shape = replace(
                SHAPES["tiny-qwen3moe"], name="routed", n_layer=traces.LAYERS, n_expert=traces.EXPERTS, n_used=_USED
            )
            rows = {row.name: row for row in load_registry().archs}
            model = read_model(TinyModels(folder).path(shape), rows)
            self.facts, self.routers = replace(self.facts, model=model), read_routers(model)

    def random(self, seed: int, tokens: int = 12) -> Iterator[Seen]:
        """Every layer of ``tokens`` decodes of one token, or of three."""
        draw = random.Random(seed)
        for _ in range(tokens):
            width = draw.choice((1, 1, 1, 3))
            for layer in range(traces.LAYERS):
                rows = [draw.sample(range(traces.EXPERTS), _USED) for _ in range(width)]
                yield self._of(layer, rows, [draw.randrange(1 << 30) for _ in range(width)])

    def steady(self) -> list[Seen]:
        """One token's routings, always the same; with inputs, that is one which no layer changes."""
        rows = [[(layer * 5 + slot * 3) % traces.EXPERTS for slot in range(_USED)] for layer in range(traces.LAYERS)]
        return [self._of(layer, [row], [0]) for layer, row in enumerate(rows)]

    def _of(self, layer: int, rows: list[list[int]], seeds: list[int]) -> Seen:
        router = self.routers.get(layer)
        if router is None:
            return Seen(layer, np.array(rows, dtype=np.int32))
        width = self.facts.model.n_embd
        x = np.stack([np.random.default_rng(seed).standard_normal(width, dtype=np.float32) for seed in seeds])
        return Seen(layer, np.stack([router.rank(row)[:_USED] for row in x]).astype(np.int32), x)
