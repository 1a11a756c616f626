"""The gate of prefetchers: subclass :class:`PrefetchGates`, name the plugin; pytest proves that it only suggests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from bmoe.budget import MIB, size_budget
from bmoe.contracts import ExpertKey, Prefetcher, Provider, key_parts
from bmoe.errors import ModelError
from bmoe.native import memory
from bmoe.resolve import resolve
from bmoe.sight import OFFERED
from bmoe.testing import traces
from bmoe.testing.archs import UBATCH, ArchGates, Bench, Cell, compare, make_prompts, session_bench
from bmoe.testing.identity import RecordingEngine
from bmoe.testing.inputs import Inputs, Seen
from bmoe.testing.load import IN_TREE, load_provider
from bmoe.testing.watch import Watch

_ARCH = "qwen3moe"


@pytest.mark.gate
class PrefetchGates:
    """Proves that a prefetcher keeps its contract. A subclass sets class attributes and nothing else.

    ``plugin`` is the entry point of group ``bmoe.plugins`` (``"bmoe"`` for in-tree ones) that provides ``provider``.
    ``learns_in`` is how many tokens of a repeating text it may see before it has to suggest something. One that ranks
    by the model's routers is shown what those choose, and the inputs that they chose by. One that works in a thread has
    a method ``wait``, which returns when all that was seen is worked in.
    """

    plugin: ClassVar[str]
    provider: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    learns_in: ClassVar[int] = 8

    def load(self) -> Provider[Prefetcher]:
        """The provider under test, by name."""
        return load_provider("prefetch", self.plugin, self.provider)

    @pytest.fixture(name="bench")
    def _bench(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
        return session_bench(request, tmp_path_factory)

    @pytest.fixture(name="inputs")
    def _inputs(self, bench: Bench) -> Inputs:
        provider, made_up = self.load(), Inputs(None)
        try:
            getattr(provider.build(provider.options(**self.options), made_up.facts), "close", lambda: None)()
        except ModelError:
            return Inputs(bench.folder)  # it needs what a made-up model lacks
        return made_up

    @pytest.fixture(name="build")
    def _build(self, inputs: Inputs) -> Iterator[Callable[[], _Asked]]:
        """Fresh prefetchers for the model of the seeded routings."""
        provider, built = self.load(), list[_Asked]()

        def build() -> _Asked:
            built.append(_Asked(provider.build(provider.options(**self.options), inputs.facts)))
            return built[-1]

        yield build
        for each in built:
            each.close()
            each.close()

    # ---- without a decode

    def test_is_lossless(self) -> None:
        """What is read ahead cannot change the output."""
        assert not self.load().lossy

    def test_wants_what_is_offered(self, build: Callable[[], _Asked]) -> None:
        """It asks to see nothing that no routing has."""
        assert build().prefetcher.wants <= OFFERED

    def test_suggests_nothing_wrong_before_it_saw_anything(self, build: Callable[[], _Asked]) -> None:
        """A new prefetcher may be asked at any layer."""
        asked = build()
        for layer in range(traces.LAYERS):
            asked.suggest(layer)

    @pytest.mark.parametrize("seed", range(4))
    def test_suggests_entries_of_the_model(self, build: Callable[[], _Asked], inputs: Inputs, seed: int) -> None:
        """Whatever was routed, each suggestion is an entry, and none comes twice in one answer."""
        asked = build()
        for seen in inputs.random(seed):
            asked.observe(seen)
            asked.suggest(seen.layer)

    def test_is_deterministic(self, build: Callable[[], _Asked], inputs: Inputs) -> None:
        """Two of them that saw the same suggest the same."""
        one, two = build(), build()
        for seen in inputs.random(7):
            one.observe(seen)
            two.observe(seen)
            assert one.suggest(seen.layer) == two.suggest(seen.layer)

    def test_keeps_nothing_of_an_event(self, build: Callable[[], _Asked], inputs: Inputs) -> None:
        """The arrays of an event are llama.cpp's memory, which holds something else after the call."""
        kept, copied = build(), build()
        for seen in inputs.random(3):
            lent = seen.copy()
            kept.observe(lent)
            lent.fill()
            copied.observe(seen)
            assert kept.suggest(seen.layer) == copied.suggest(seen.layer)

    def test_foresees_a_text_that_repeats(self, build: Callable[[], _Asked], inputs: Inputs) -> None:
        """Where every token is routed alike, it suggests something that is used: it is not inert."""
        asked, steady = build(), inputs.steady()
        suggested: set[ExpertKey] = set()
        for _ in range(self.learns_in + 1):
            for seen in steady:
                asked.observe(seen)
                suggested |= set(asked.suggest(seen.layer))
        found = {(key_parts(key).layer, key_parts(key).expert) for key in suggested}
        used = {(seen.layer, e) for seen in steady for e in seen.ids[0].tolist()}
        assert found & used, "nothing that it suggests is ever used"

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


class _Asked:
    """A prefetcher, and what it answers, which is looked at."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self.prefetcher = prefetcher

    def observe(self, seen: Seen) -> None:
        self.prefetcher.observe(seen.event())
        getattr(self.prefetcher, "wait", lambda: None)()

    def suggest(self, layer: int) -> list[ExpertKey]:
        keys = _entries(self.prefetcher.suggest(layer))
        _entries(getattr(self.prefetcher, "retain", lambda layer: ())(layer))
        return keys

    def close(self) -> None:
        getattr(self.prefetcher, "close", lambda: None)()


def _entries(keys: Sequence[ExpertKey]) -> list[ExpertKey]:
    assert len(set(keys)) == len(keys), "an entry is named twice"
    for key in keys:
        layer, bank, expert = key_parts(key)
        assert 0 <= layer < traces.LAYERS
        assert bank == 0
        assert 0 <= expert < traces.EXPERTS
    return list(keys)
