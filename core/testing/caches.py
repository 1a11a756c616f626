"""The gate of cache policies: subclass :class:`CachePolicyGates`, name the plugin, and pytest proves the contract."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.contracts import (
    BankFacts,
    BatchContext,
    CacheFacts,
    CachePolicy,
    ExpertKey,
    Facts,
    FetchFacts,
    ModelFacts,
    Observer,
    Provider,
    RoutingEvent,
)
from bmoe.replay import Replayed, Trace, cycle, entries, most_hits, replay
from bmoe.sight import OFFERED
from bmoe.testing import traces
from bmoe.testing.load import load_provider

_KEYS = [layer << 24 | expert for layer in range(3) for expert in range(5)]
_BATCH = st.lists(st.sampled_from(_KEYS), min_size=1, max_size=4, unique=True)
_OPERATION = st.one_of(
    st.tuples(st.just("touch"), _BATCH),
    st.tuples(st.just("speculate"), _BATCH),
    st.tuples(st.just("forget"), _BATCH),
    st.tuples(st.just("victim"), st.lists(st.sampled_from(_KEYS), max_size=15, unique=True)),
)
_TRACE = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)).map(lambda t: [t]),
    max_size=40,
)


@pytest.mark.gate
class CachePolicyGates:
    """Proves that a cache policy keeps its contract. A subclass sets class attributes and nothing else.

    ``plugin`` is the entry point of group ``bmoe.plugins`` that provides ``provider``, ``"bmoe"`` for bmoe's own; a
    class that overrides ``load`` tests a provider that is not installed. ``golden`` holds the exact hits on the traces
    of :data:`bmoe.testing.traces.GOLDEN`; what is missing fails and is printed, to be recorded. ``naive`` builds, for
    a capacity, a plain model of the same policy, which must name the same victims. ``ranks_by_use`` is set to False by
    a policy that does not look at use. ``examples`` is how many random sequences each property gets. A policy with
    ``wants`` is shown routings with seeded probabilities wherever it is driven.
    """

    plugin: ClassVar[str]
    provider: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    golden: ClassVar[Mapping[str, int]] = {}
    naive: ClassVar[type[Any] | staticmethod[[int], CachePolicy] | None] = None
    ranks_by_use: ClassVar[bool] = True
    examples: ClassVar[int] = 100

    # ---- building

    def load(self) -> Provider[CachePolicy]:
        """The provider under test, by name."""
        return load_provider("cache", self.plugin, self.provider)

    @cached_property
    def loaded(self) -> Provider[CachePolicy]:
        """The provider, loaded once a test."""
        return self.load()

    def build(self, capacity: int, token_cycle: int = 24) -> CachePolicy:
        """A fresh policy for ``capacity`` entries."""
        provider = self.loaded
        return provider.build(provider.options(**self.options), cache_facts(capacity, token_cycle))

    def random_examples(self) -> settings:
        """The same examples in every run, and the first failure alone, shrunk."""
        return settings(
            max_examples=self.examples, derandomize=True, database=None, deadline=None, report_multiple_bugs=False
        )

    def play(self, name: str) -> Replayed:
        """A fresh policy on a golden trace, with room for a third of its entries."""
        trace = traces.GOLDEN[name]()
        return replay(self.build(_room(trace), cycle(trace)), trace, _room(trace), traces.probabilities(trace))

    # ---- the contract

    def test_is_lossless_and_declares_below_cycle(self) -> None:
        """Ranking cannot change the output, and what is possible below one token's cycle is declared."""
        assert not self.loaded.lossy
        assert isinstance(self.build(8).below_cycle, bool)

    def test_victim_is_resident_and_not_pinned_whatever_happens(self) -> None:
        """Touch, speculation, eviction and forgetting in any order: a victim exists exactly if one may be named."""
        self.build(1)  # what cannot be loaded fails here, once, and not in every example

        @self.random_examples()
        @given(st.lists(_OPERATION, max_size=40), st.integers(1, 12))
        def check(operations: list[tuple[str, list[ExpertKey]]], capacity: int) -> None:
            driver = _Driver(self.build(capacity), capacity, random.Random(capacity))
            for name, keys in operations:
                getattr(driver, name)(keys)
            driver.drain()

        check()

    def test_victim_changes_nothing(self) -> None:
        """Asking twice gives the same answer."""
        policy = self.build(8)
        policy.touch(_KEYS[:6])
        for key in _KEYS[:6]:
            policy.admit(key, False)
        first = policy.victim(frozenset(_KEYS[:1]))
        assert first is not None
        assert [policy.victim(frozenset(_KEYS[:1])) for _ in range(3)] == [first] * 3

    @pytest.mark.parametrize("name", sorted(traces.GOLDEN))
    def test_is_deterministic(self, name: str) -> None:
        """The same facts and trace give the same victims, whatever the process's random state."""
        state = random.getstate()
        try:
            random.seed(1)
            first = self.play(name)
            random.seed(2)
            second = self.play(name)
        finally:
            random.setstate(state)
        assert first == second

    # ---- what it sees

    def test_wants_what_is_offered(self) -> None:
        """It asks to see nothing that no routing has, and can be shown what it asks for."""
        policy = self.build(8)
        assert _wants(policy) <= OFFERED
        assert not _wants(policy) or isinstance(policy, Observer)

    def test_keeps_no_view(self) -> None:
        """What an event shows is llama.cpp's memory, which is overwritten afterwards."""
        trace = traces.zipf(1, steps=40)
        lent = [row.copy() for row in traces.probabilities(trace)]
        kept = replay(_Lent(self.build(16)), trace, 16, lent)
        assert kept == replay(self.build(16), trace, 16, traces.probabilities(trace))

    def test_what_it_sees_decides(self) -> None:
        """A policy that wants to see probabilities gives up other entries when they are others."""
        if "probs" not in _wants(self.build(8)):
            pytest.skip("it does not want to see probabilities")
        trace = traces.zipf(1)
        one, other = (
            replay(self.build(_room(trace), cycle(trace)), trace, _room(trace), traces.probabilities(trace, seed))
            for seed in (0, 1)
        )
        assert one.victims != other.victims, "victims are the same whatever the router gave: the policy does not look"

    # ---- its ranking

    @pytest.mark.parametrize("name", sorted(traces.GOLDEN))
    def test_golden_hits(self, name: str) -> None:
        """Exact hits on a seeded trace: a change of the ranking is seen and has to be recorded."""
        hits = self.play(name).hits
        if name not in self.golden:
            pytest.fail(f"no golden hits for trace {name!r}; record golden = {{..., {name!r}: {hits}}}")
        assert self.golden[name] == hits

    @pytest.mark.parametrize("name", sorted(traces.GOLDEN))
    def test_hits_are_possible(self, name: str) -> None:
        """No more hits than the best policy that knows the future."""
        trace = traces.GOLDEN[name]()
        played = self.play(name)
        assert 0 <= played.hits <= most_hits(trace, _room(trace)) < played.lookups

    def test_equals_its_naive_model(self) -> None:
        """Where a plain model of the policy is named, both give up the same entries in the same order."""
        model = self.naive
        if model is None:
            pytest.skip("no naive model is declared")

        @self.random_examples()
        @given(_TRACE, st.integers(1, 12))
        def check(trace: Trace, capacity: int) -> None:
            probs = traces.probabilities(trace)
            assert replay(self.build(capacity), trace, capacity, probs) == replay(
                model(capacity), trace, capacity, probs
            )

        check()

    @pytest.mark.parametrize("name", sorted(traces.GOLDEN))
    def test_was_exercised(self, name: str) -> None:
        """The gate made the policy choose, and use decides its choices exactly if it says so."""
        trace = traces.GOLDEN[name]()
        played = self.play(name)
        deaf = replay(_Deaf(self.build(_room(trace), cycle(trace))), trace, _room(trace))  # and blind
        assert played.evictions > 0
        assert played.lookups > played.hits
        if not self.ranks_by_use:
            assert played.victims == deaf.victims, "ranks_by_use = False, but use changes the victims"
        elif name != "scan":  # where everything is used equally, order of use and of admission may agree
            assert played.victims != deaf.victims, "victims are the same without touch(): the policy is inert"

    def test_below_cycle_is_true(self) -> None:
        """Hits with room for half of what a token touches, on a repeating or a skewed trace, exactly if declared."""
        hits = 0
        for trace in (traces.repeat(), traces.zipf(1)):
            room = cycle(trace) // 2
            policy = self.build(room, cycle(trace))
            hits += replay(policy, trace, room, traces.probabilities(trace)).hits
        assert (hits > 0) == policy.below_cycle, f"below_cycle = {policy.below_cycle}, but there are {hits} hits"


def cache_facts(capacity: int, token_cycle: int = 24, seed: int = 0) -> Facts:
    """Facts for a policy's ``build``: a made-up model of 1 MiB entries and room for ``capacity`` of them."""
    used = max(1, token_cycle // traces.LAYERS)
    banks = tuple(BankFacts(layer, 0, traces.EXPERTS, used, ()) for layer in range(traces.LAYERS))
    model = ModelFacts(
        path="made-up.gguf", name="made up", arch="made-up", shards=(), n_layer=traces.LAYERS, n_expert=traces.EXPERTS,
        n_used=used, n_embd=64, n_vocab=256, n_ctx_train=512, n_nextn=0, banks=banks, dense=(),
    )  # fmt: skip
    cache = CacheFacts(budget_bytes=capacity << 20, capacity=capacity, cycle=token_cycle, seed=seed)
    return Facts(model, cache, FetchFacts(paths=(), lanes=1, direct=False, batch=64))


def _room(trace: Trace) -> int:
    return entries(trace) // 3


def _wants(policy: CachePolicy) -> frozenset[str]:
    wants: frozenset[str] = getattr(policy, "wants", frozenset())
    return wants


def _events(keys: Sequence[ExpertKey], rng: random.Random) -> list[RoutingEvent]:
    """A routing of one token per layer of ``keys``, as odd as a graph may show one.

    Without what was wanted, of no token, of several, with numbers that are none.
    """
    found = []
    for layer in dict.fromkeys(key >> 24 for key in keys):
        ids = [key & 0xFFFF for key in keys if key >> 24 == layer]
        rows = rng.choice((1, 1, 1, 3, 0))
        probs: np.ndarray[Any, np.dtype[np.float32]] | None = np.array(
            [[rng.choice((rng.random(), 0.0, 1.0, math.nan)) for _ in range(traces.EXPERTS)] for _ in range(rows)],
            np.float32,
        ).reshape(rows, traces.EXPERTS)
        if rng.random() < 0.2:
            probs = None
        batch = BatchContext("decode", tuple(range(rows)))
        found.append(RoutingEvent(layer, 0, batch, np.array([ids] * rows, np.int32).reshape(rows, len(ids)), probs))
    return found


class _Lent:
    """A policy whose events are overwritten once it has seen them."""

    def __init__(self, policy: CachePolicy) -> None:
        self._policy, self.below_cycle, self.wants = policy, policy.below_cycle, _wants(policy)
        self.touch, self.admit, self.victim, self.forget = policy.touch, policy.admit, policy.victim, policy.forget

    def observe(self, event: RoutingEvent, /) -> None:
        """Show it, and overwrite it."""
        assert isinstance(self._policy, Observer)
        self._policy.observe(event)
        event.ids[:] = 0
        if event.probs is not None:
            event.probs[:] = math.nan


class _Deaf:
    """A policy whose touches are lost."""

    def __init__(self, policy: CachePolicy) -> None:
        self.below_cycle = policy.below_cycle
        self.admit, self.victim, self.forget = policy.admit, policy.victim, policy.forget

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        """Lose them."""


class _Driver:
    """Drives a policy as a store does, and knows what is resident."""

    def __init__(self, policy: CachePolicy, capacity: int, rng: random.Random) -> None:
        self._policy, self._capacity, self._rng = policy, capacity, rng
        self._resident: set[ExpertKey] = set()

    def touch(self, keys: list[ExpertKey]) -> None:
        if isinstance(self._policy, Observer) and self._policy.wants:
            for event in _events(keys, self._rng):
                self._policy.observe(event)
        self._policy.touch(keys)
        for key in keys:
            if key not in self._resident:
                self._evict_for_one(frozenset(keys))
                self._resident.add(key)
                self._policy.admit(key, False)

    def speculate(self, keys: list[ExpertKey]) -> None:
        for key in keys:
            if key not in self._resident and len(self._resident) < self._capacity:
                self._resident.add(key)
                self._policy.admit(key, True)

    def forget(self, keys: list[ExpertKey]) -> None:
        for key in keys:
            self._resident.discard(key)
            self._policy.forget(key)

    def victim(self, keys: list[ExpertKey]) -> None:
        self._choose(frozenset(keys))

    def drain(self) -> None:
        """Give up everything: nothing was lost and nothing is named twice."""
        while self._resident:
            self._evict(frozenset())
        assert self._policy.victim(frozenset()) is None, "victim() names an entry although none is resident"

    def _evict_for_one(self, pinned: frozenset[ExpertKey]) -> None:
        while len(self._resident) >= self._capacity and not self._resident <= pinned:
            self._evict(pinned)

    def _evict(self, pinned: frozenset[ExpertKey]) -> None:
        victim = self._choose(pinned)
        assert victim is not None
        self._resident.remove(victim)
        self._policy.forget(victim)

    def _choose(self, pinned: frozenset[ExpertKey]) -> ExpertKey | None:
        victim = self._policy.victim(pinned)
        if self._resident <= pinned:
            assert victim is None, f"victim() names {victim:#x} although everything is pinned or gone"
        else:
            assert victim in self._resident - pinned, f"victim() is {victim!r}, which is not resident or is pinned"
        return victim
