"""The gate of routing policies: subclass :class:`RoutingGates`; pytest proves that only what is to bite does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from bmoe.budget import MIB, size_budget
from bmoe.contracts import BatchContext, ModelFacts, Phase, Provider, Routing, RoutingPolicy
from bmoe.errors import ModelError
from bmoe.native import memory
from bmoe.resolve import resolve
from bmoe.testing import traces
from bmoe.testing.archs import UBATCH, ArchGates, Bench, Cell, budget_bytes, compare, make_prompts, session_bench
from bmoe.testing.identity import Generation, RecordingEngine
from bmoe.testing.inputs import Inputs
from bmoe.testing.load import IN_TREE, load_provider
from bmoe.testing.watch import Watch

EXPERTS, USED = traces.EXPERTS, 3
ARCHS = ("qwen3moe", "olmoe", "gpt-oss", "deepseek2")
"""Weights divided by their sum, taken as they are, a softmax of the chosen, with a bias on the choice."""


@pytest.mark.gate
class RoutingGates:
    """Proves that a routing policy keeps its contract. A subclass sets class attributes.

    ``plugin`` is the entry point of group ``bmoe.plugins`` (``"bmoe"`` for in-tree ones) that provides ``provider``.
    What is neutral the provider says, and which options to try, each of which must change the output; ``biting`` are
    others to try. ``needs`` are tables of a profile that the policy cannot do without, beside plugins that it names.
    ``keeps_best`` says that a token's best expert always stays.
    """

    plugin: ClassVar[str]
    provider: ClassVar[str]
    biting: ClassVar[Sequence[Mapping[str, Any]]] = ()
    needs: ClassVar[Mapping[str, Any]] = {}
    keeps_best: ClassVar[bool] = False
    archs: ClassVar[Sequence[str]] = ARCHS

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per setting that bites."""
        if "options" in metafunc.fixturenames:
            metafunc.parametrize("options", self.settings(), ids=str)

    def load(self) -> Provider[RoutingPolicy]:
        """The provider under test, by name."""
        return load_provider("routing", self.plugin, self.provider)

    def build(self, options: Mapping[str, Any], inputs: Inputs) -> RoutingPolicy:
        """A fresh policy for the model of the seeded routings."""
        provider = self.load()
        return provider.build(provider.options(**options), inputs.facts)

    def settings(self) -> Sequence[Mapping[str, Any]]:
        """The options to try."""
        return tuple(self.biting or self.load().trials)

    def neutral_for(self, model: ModelFacts) -> Mapping[str, Any]:
        """The options with which a model's output is its own."""
        neutral = self.load().neutral
        assert neutral is not None, "the provider does not say which options are neutral"
        return neutral(model)

    @pytest.fixture(name="bench")
    def _bench(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
        return session_bench(request, tmp_path_factory)

    @pytest.fixture(name="inputs")
    def _inputs(self, bench: Bench) -> Inputs:
        made_up = Inputs(None)
        try:
            self.build(self.settings()[0], made_up)
        except ModelError:
            return Inputs(bench.folder)  # it needs what a made-up model lacks
        return made_up

    # ---- without a model

    def test_says_that_it_is_lossy(self) -> None:
        """Every run record carries the mark, and it says what is neutral and what to try."""
        provider = self.load()
        assert provider.lossy
        assert provider.neutral is not None, "the provider does not say which options are neutral"
        assert self.settings(), "the provider has no options to try"

    def test_every_setting_that_bites_does(self, inputs: Inputs) -> None:
        """A policy that changes nothing would pass everything else."""
        for options in self.settings():
            policy = self.build(options, inputs)
            changed = [_apply(policy, routing) for routing in routings(policy.phases, inputs)]
            assert any(changed), f"{options} never changes a routing"

    def test_what_it_leaves_can_be_computed(self, inputs: Inputs) -> None:
        """Ids of experts, none twice among those that take part, one at least, the best one if it is to stay."""
        for options in self.settings():
            policy = self.build(options, inputs)
            for routing in routings(policy.phases, inputs, seed=1):
                best = routing.ids[:, 0].copy()
                _apply(policy, routing)
                out = routing.dead | routing.mute
                assert routing.ids.dtype == np.int32
                assert ((routing.ids >= 0) & (routing.ids < routing.n_expert)).all()
                for ids, gone, first in zip(routing.ids.tolist(), out.tolist(), best.tolist(), strict=True):
                    live = [e for e, away in zip(ids, gone, strict=True) if not away]
                    assert live, "a token is left without an expert"
                    assert len(set(live)) == len(live), "an expert is chosen twice"
                    assert not self.keeps_best or first in live, "the best expert of a token is gone"

    def test_it_writes_only_what_it_may(self, inputs: Inputs) -> None:
        """The router's numbers and the residency are for reading."""
        policy = self.build(self.settings()[0], inputs)
        for routing in routings(policy.phases, inputs, seed=2):
            columns = ("shares", "probs", "scores", "ranking", "resident")
            before = {name: getattr(routing, name).copy() for name in columns}
            _apply(policy, routing)
            for name, column in before.items():
                assert np.array_equal(column, getattr(routing, name)), f"{name} was written to"

    def test_is_deterministic(self, inputs: Inputs) -> None:
        """Two of them that saw the same do the same."""
        for options in self.settings():
            one, two = self.build(options, inputs), self.build(options, inputs)
            pairs = zip(routings(one.phases, inputs, seed=3), routings(one.phases, inputs, seed=3), strict=True)
            for first, second in pairs:
                one.apply(first)
                two.apply(second)
                for name in ("ids", "dead", "mute"):
                    assert np.array_equal(getattr(first, name), getattr(second, name))

    # ---- with one

    @pytest.mark.parametrize("seam", ["c", "python"])
    @pytest.mark.parametrize("overlap", ["off", "projection"])
    def test_neutral_is_the_model_itself(self, bench: Bench, overlap: str, seam: str) -> None:
        """Logits equal plain llama.cpp's with the neutral setting, of every way in which graphs weigh experts."""
        for arch in self.archs:
            cell = Cell("half", seam=seam, overlap=overlap)
            with self.open(bench, arch, cell) as (engine, gate, _):
                prompts = make_prompts(engine.facts)
                references = bench.references.of(gate.table(gate.model(bench), cell, engine.width), prompts)
                with engine.conversation() as one:
                    for index in (0, 1, 2, 0):
                        compare(engine, one, prompts[index], references[index])
                assert engine.stream is not None
                assert engine.stream.knobs is not None
                knobs = engine.stream.knobs.counters
                assert knobs.dropped == knobs.substituted == 0
                assert knobs.lost < 1e-6 * max(1, knobs.routings)

    def test_biting_changes_the_output(self, bench: Bench, options: Mapping[str, Any]) -> None:
        """The setting changes logits, alike in both seams; what only slots without a part would need is not read."""
        for arch in self.archs:
            rows, changes = [], 0
            for seam in ("c", "python"):
                cell = Cell("half", seam=seam)
                with self.open(bench, arch, cell, options) as (engine, gate, watch):
                    prompts = make_prompts(engine.facts)
                    references = bench.references.of(gate.table(gate.model(bench), cell, engine.width), prompts)
                    with engine.conversation() as one:
                        made = [engine.generate(one, prompts[at]) for at in (2, 1, 2)]
                    rows.append(made)
                    assert engine.record.lossy, "the run record does not say that the run was lossy"
                    assert engine.stream is not None
                    assert engine.stream.knobs is not None
                    counters, knobs = engine.stream.store.counters, engine.stream.knobs.counters
                    changes += knobs.dropped + knobs.substituted
                    read = sum(watch.fetcher.read.values())
                    exact = engine.plan.prefetch is None  # else some was read ahead
                    assert not exact or counters.lookups - counters.hits == read, (
                        "something else was read than what takes part"
                    )
            assert rows[0] == rows[1], f"{arch}: the two seams differ"
            changed = _rows(rows[0]) != _rows([references[at] for at in (2, 1, 2)])
            assert changed == bool(changes), f"{arch}: {changes} slots changed, and the logits {'do' * changed}"
            assert changes, f"{arch}: {options} changes nothing in a real run"

    @pytest.mark.parametrize("budget", [0.02, 0.2])
    def test_no_token_loses_more_than_the_budget(self, bench: Bench, budget: float) -> None:
        """With a loss budget the bound holds for every token of every decode."""
        for arch in self.archs:
            for options in self.settings():
                extra = {"loss": {"budget": budget}}
                with self.open(bench, arch, Cell("half"), options, extra) as (engine, _, _):
                    assert engine.stream is not None
                    knobs = engine.stream.knobs
                    assert knobs is not None
                    prompts = make_prompts(engine.facts)
                    with engine.conversation() as one:
                        for prompt in prompts:
                            for _ in one.generate(prompt, 6):
                                assert knobs.worst <= budget + 1e-9
                    assert knobs.counters.lost <= budget * knobs.counters.routings + 1e-9

    def open(
        self,
        bench: Bench,
        arch: str,
        cell: Cell,
        options: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> _Opened:
        """An engine with the policy over a tiny model of ``arch``, its reads watched; neutral without ``options``."""
        gate = _gate(arch)
        path = gate.model(bench)
        chosen = self.neutral_for(resolve(gate.table(path, cell)).facts) if options is None else options
        table = {
            **gate.table(path, cell, UBATCH),
            "cache": {"policy": "lru", "budget_mb": 1024},
            **_needed(self.load().needs),
            **self.needs,
            "routing": [{"plugin": self.provider, "options": dict(chosen)}],
            "plugins": {"enable": [] if self.plugin == IN_TREE else [self.plugin], "allow_experimental": True},
            **(extra or {}),
        }
        plan = resolve(table)
        amount = budget_bytes(cell.budget, plan.facts)
        ahead = plan.prefetch is not None
        plan = replace(plan, budget=size_budget(amount, amount / MIB, plan.facts, memory.PAGE, ahead=ahead))
        watch = Watch()
        return _Opened(RecordingEngine(watch.over(plan), seam=cell.seam), watch, gate)


def _needed(needs: Sequence[str]) -> dict[str, Any]:
    """The tables of a profile that choose what a provider needs."""
    named = [need.partition(":")[::2] for need in needs if not need.endswith(":*")]
    return {kind: {"policy": name} for kind, name in named if kind in ("cache", "prefetch")}


class _Opened:
    def __init__(self, engine: RecordingEngine, watch: Watch, gate: ArchGates) -> None:
        self._engine, self._watch, self._gate = engine, watch, gate

    def __enter__(self) -> tuple[RecordingEngine, ArchGates, Watch]:
        self._watch.begin(self._engine)
        return self._engine, self._gate, self._watch

    def __exit__(self, *exc: object) -> None:
        self._engine.close()


def _gate(arch: str) -> ArchGates:
    made: ArchGates = type("_Model", (ArchGates,), {"arch": arch, "provider": arch, "__test__": False})()
    return made


def _rows(made: Sequence[Generation]) -> list[tuple[str, ...]]:
    return [generation.rows for generation in made]


def _apply(policy: RoutingPolicy, routing: Routing) -> bool:
    before = routing.ids.copy()
    policy.apply(routing)
    return bool((routing.ids != before).any() or routing.dead.any() or routing.mute.any())


def routings(phases: frozenset[str], inputs: Inputs, seed: int = 0, tokens: int = 24) -> Iterator[Routing]:
    """Seeded routings of the kinds of batches in ``phases``; half of the experts are in memory.

    Of a model with routers they are what those make of random inputs, else made up.
    """
    draw = np.random.default_rng(seed)
    position = 0
    for step in range(tokens):
        phase: Phase = "prefill" if "prefill" in phases and ("decode" not in phases or step % 3 == 0) else "decode"
        if phase not in phases:
            phase = "verify"
        width = 1 if phase == "decode" else int(draw.integers(2, 9))
        positions = tuple(range(position, position + width))
        position += width
        importance = tuple(float(x) for x in draw.random(width)) if phase == "prefill" else ()
        for layer in range(traces.LAYERS):
            router = inputs.routers.get(layer)
            x = draw.normal(0, 1, (width, inputs.facts.model.n_embd)).astype(np.float32)
            logits = draw.normal(0, 2, (width, EXPERTS)) if router is None else np.stack([router.logits(r) for r in x])
            probs = np.exp(logits - logits.max(axis=1, keepdims=True))
            probs = (probs / probs.sum(axis=1, keepdims=True)).astype(np.float32)
            ranking = np.argsort(-logits, axis=1, kind="stable").astype(np.int32)
            ids = ranking[:, :USED].copy()
            shares = np.take_along_axis(probs, ids, 1)
            yield Routing(
                layer=layer,
                bank=0,
                n_expert=EXPERTS,
                batch=BatchContext(phase, positions, importance=importance),
                ids=ids,
                dead=np.zeros(ids.shape, bool),
                mute=np.zeros(ids.shape, bool),
                shares=(shares / shares.sum(axis=1, keepdims=True)).astype(np.float32),
                probs=probs,
                scores=probs,
                ranking=ranking,
                resident=draw.random(EXPERTS) < 0.5,
                activation=x,
            )
