"""The gate of prefetchers: subclass :class:`PrefetchGates`, name the plugin; pytest proves that it only suggests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from bmoe.budget import MIB, size_budget
from bmoe.contracts import BatchContext, ExpertKey, Facts, Prefetcher, Provider, RoutingEvent, key_parts
from bmoe.native import memory
from bmoe.resolve import resolve
from bmoe.sight import OFFERED
from bmoe.testing import traces
from bmoe.testing.archs import UBATCH, ArchGates, Bench, Cell, compare, make_prompts, session_bench
from bmoe.testing.caches import cache_facts
from bmoe.testing.identity import RecordingEngine
from bmoe.testing.load import IN_TREE, load_provider
from bmoe.testing.watch import Watch

_ARCH = "qwen3moe"


@pytest.mark.gate
class PrefetchGates:
    """Proves that a prefetcher keeps its contract. A subclass sets class attributes and nothing else.

    ``plugin`` is the entry point of group ``bmoe.plugins`` (``"bmoe"`` for in-tree ones) that provides ``provider``.
    ``learns_in`` is how many tokens of a repeating text it may see before it has to suggest something.
    """

    plugin: ClassVar[str]
    provider: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    learns_in: ClassVar[int] = 8

    def load(self) -> Provider[Prefetcher]:
        """The provider under test, by name."""
        return load_provider("prefetch", self.plugin, self.provider)

    def build(self, facts: Facts | None = None) -> Prefetcher:
        """A fresh prefetcher, by default for the made-up model of the seeded traces."""
        provider = self.load()
        return provider.build(provider.options(**self.options), facts or cache_facts(64))

    @pytest.fixture(name="bench")
    def _bench(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
        return session_bench(request, tmp_path_factory)

    # ---- without a model

    def test_is_lossless(self) -> None:
        """What is read ahead cannot change the output."""
        assert not self.load().lossy

    def test_wants_what_is_offered(self) -> None:
        """It asks to see nothing that no routing has."""
        assert self.build().wants <= OFFERED

    def test_suggests_nothing_wrong_before_it_saw_anything(self) -> None:
        """A new prefetcher may be asked at any layer."""
        prefetcher = self.build()
        for layer in range(traces.LAYERS):
            _check(prefetcher.suggest(layer))

    @pytest.mark.parametrize("seed", range(4))
    def test_suggests_entries_of_the_model(self, seed: int) -> None:
        """Whatever was routed, each suggestion is an entry, and none comes twice in one answer."""
        prefetcher = self.build()
        for layer, ids in _random(seed):
            prefetcher.observe(_event(layer, ids))
            _check(prefetcher.suggest(layer))

    def test_is_deterministic(self) -> None:
        """Two of them that saw the same suggest the same."""
        one, two = self.build(), self.build()
        for layer, ids in _random(7):
            one.observe(_event(layer, ids))
            two.observe(_event(layer, ids))
            assert list(one.suggest(layer)) == list(two.suggest(layer))

    def test_keeps_nothing_of_an_event(self) -> None:
        """The arrays of an event are llama.cpp's memory, which holds something else after the call."""
        kept, copied = self.build(), self.build()
        for layer, ids in _random(3):
            lent = ids.copy()
            kept.observe(_event(layer, lent))
            lent.fill(0)
            copied.observe(_event(layer, ids))
            assert list(kept.suggest(layer)) == list(copied.suggest(layer))

    def test_foresees_a_text_that_repeats(self) -> None:
        """Where every token is routed alike, it suggests something that is used: it is not inert."""
        prefetcher = self.build()
        used = {layer: [(layer * 5 + slot * 3) % traces.EXPERTS for slot in range(3)] for layer in range(traces.LAYERS)}
        suggested: set[ExpertKey] = set()
        for _ in range(self.learns_in + 1):
            for layer, ids in used.items():
                prefetcher.observe(_event(layer, np.array([ids], dtype=np.int32)))
                suggested |= set(prefetcher.suggest(layer))
        found = {(key_parts(key).layer, key_parts(key).expert) for key in suggested}
        assert found & {(layer, e) for layer, ids in used.items() for e in ids}, "nothing that it suggests is ever used"

    # ---- with one

    @pytest.mark.parametrize("overlap", ["off", "projection"])
    @pytest.mark.parametrize("seam", ["c", "python"])
    def test_identity(self, bench: Bench, overlap: str, seam: str) -> None:
        """Logits equal plain llama.cpp's, guesses were read and used, and the cache holds what it may."""
        gate = _Model()
        cell = Cell("cycle", "pread-2", seam=seam, overlap=overlap)
        path = gate.model(bench)
        table = {
            **gate.table(path, cell, UBATCH),
            "prefetch": {"policy": self.provider, "options": dict(self.options)},
            "cache": {"policy": "lru", "budget_mb": 1024},
            "plugins": {"enable": [] if self.plugin == IN_TREE else [self.plugin]},
        }
        plan = resolve(table)
        amount = size_budget(0, 0, plan.facts, memory.PAGE, ahead=True).least
        plan = replace(plan, budget=size_budget(amount, amount / MIB, plan.facts, memory.PAGE, ahead=True))
        assert plan.budget.room
        watch = Watch()
        engine = RecordingEngine(watch.over(plan), seam=seam)
        with engine:
            watch.begin(engine)
            assert engine.stream is not None
            lane = engine.stream.lane
            assert lane is not None
            prompts = make_prompts(engine.facts)
            references = bench.references.of(gate.table(path, cell, engine.width), prompts)
            with engine.conversation() as one, engine.conversation() as two:
                for _ in range(3):
                    for conversation, index in ((one, 0), (one, 1), (two, 0), (one, 2)):
                        compare(engine, conversation, prompts[index], references[index])
            counters = lane.counters
            assert counters.read_bytes > 0, "nothing was read ahead: the prefetcher is inert here"
            assert counters.claimed > 0, "nothing that was read ahead was used"
            assert counters.used_bytes + counters.wasted_bytes <= counters.read_bytes
            assert engine.stream.counters.read_bytes + counters.read_bytes == watch.fetcher.nbytes


class _Model(ArchGates):
    arch = _ARCH
    provider = _ARCH
    __test__ = False


def _event(layer: int, ids: np.ndarray) -> RoutingEvent:
    return RoutingEvent(layer, 0, BatchContext("decode", tuple(range(len(ids)))), ids)


def _random(seed: int, tokens: int = 12) -> Iterator[tuple[int, np.ndarray]]:
    draw = random.Random(seed)
    for _ in range(tokens):
        width = draw.choice((1, 1, 1, 3))
        for layer in range(traces.LAYERS):
            rows = [draw.sample(range(traces.EXPERTS), 3) for _ in range(width)]
            yield layer, np.array(rows, dtype=np.int32)


def _check(keys: Sequence[ExpertKey]) -> None:
    assert len(set(keys)) == len(keys), "an entry is suggested twice"
    for key in keys:
        layer, bank, expert = key_parts(key)
        assert 0 <= layer < traces.LAYERS
        assert bank == 0
        assert 0 <= expert < traces.EXPERTS
