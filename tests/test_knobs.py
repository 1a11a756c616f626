"""Routing policies against plain forms of their rules, and in an engine: what they change is what the graph does."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.choices import Choice
from bmoe.contracts import BatchContext, Options, Provider, Routing
from bmoe.engine import Engine, open_engine
from bmoe.native.weighing import weights
from bmoe.resolve import resolve
from bmoe.testing.caches import cache_facts
from bmoe.testing.load import load_provider
from bmoe.testing.models import TinyModels

EXPERTS = 12


def built(name: str, **options: Any) -> Any:
    provider = load_provider("routing", "bmoe", name)
    return provider.build(provider.options(**options), cache_facts(64))


def routing(probs: np.ndarray, used: int, resident: np.ndarray, layer: int = 0, phase: str = "decode") -> Routing:
    ranking = np.argsort(-probs, axis=1, kind="stable").astype(np.int32)
    ids = ranking[:, :used].copy()
    shares = np.take_along_axis(probs, ids, 1)
    shares = shares / shares.sum(axis=1, keepdims=True)
    batch = BatchContext(phase, tuple(range(len(ids))))
    zero = np.zeros(ids.shape, bool)
    return Routing(layer, 0, probs.shape[1], batch, ids, zero, zero.copy(), shares, probs, probs, ranking, resident)


def drawn(seed: int, tokens: int = 1) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(seed)
    logits = numbers.normal(0, 2, (tokens, EXPERTS))
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return probs.astype(np.float32), numbers.random(EXPERTS) < 0.4


# ---- plain forms of the rules (after the published descriptions; see the plugins for their sources)


def cache_prior(z: np.ndarray, resident: np.ndarray, weight: float, keep: int, used: int, delta: float) -> set[int]:
    bonus = resident.astype(float)
    bonus[np.argsort(-z, kind="stable")[:keep]] = 1
    return set(np.argsort(-(z + weight * delta * bonus), kind="stable")[:used].tolist())


def max_rank(z: np.ndarray, resident: np.ndarray, ranks: int, keep: int, used: int) -> set[int]:
    ranking = np.argsort(-z, kind="stable").tolist()
    kept = ranking[:keep]
    kept += [e for e in ranking[keep:ranks] if resident[e]][: used - len(kept)]
    kept += [e for e in ranking if e not in kept][: used - len(kept)]
    return set(kept)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), weight=st.sampled_from([0.0, 0.05, 0.2, 1.0]), keep=st.integers(1, 3))
def test_prior_is_the_published_rule(seed, weight, keep):
    policy, deltas = built("substitute", weight=weight, keep=keep), []
    for step in range(4):
        probs, resident = drawn(seed + step)
        made = routing(probs, 3, resident)
        z = np.log(probs[0].astype(np.float64))
        deltas.append(z.max() - z.min())

        policy.apply(made)

        assert cache_prior(z, resident, weight, keep, 3, float(np.mean(deltas))) == set(made.ids[0].tolist())


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(0, EXPERTS), keep=st.integers(1, 3))
def test_max_rank_is_the_published_rule(seed, ranks, keep):
    probs, resident = drawn(seed)
    made = routing(probs, 3, resident)

    built("substitute", variant="max-rank", ranks=ranks, keep=keep).apply(made)

    assert max_rank(np.log(probs[0]), resident, ranks, keep, 3) == set(made.ids[0].tolist())


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), mass=st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]), keep=st.integers(1, 3))
def test_cumulative_reaches_as_far_as_the_mass_goes(seed, mass, keep):
    probs, resident = drawn(seed)
    made = routing(probs, 3, resident)
    ordered = np.sort(probs[0].astype(np.float64))[::-1]
    reach = int((np.cumsum(ordered) - ordered < mass * (1 - 1e-6) * ordered.sum()).sum())

    built("substitute", variant="cumulative", mass=mass, keep=keep).apply(made)

    assert max_rank(np.log(probs[0]), resident, reach, keep, 3) == set(made.ids[0].tolist())


def test_a_shortlist_by_path_weighs_each_token_by_how_likely_it_is_reached():
    probs = np.array([[0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.7, 0.3]], np.float32)
    found = {}
    for score in ("sum", "path"):
        made = routing(probs, 1, np.ones(4, bool), phase="verify")
        made.batch = BatchContext("verify", (0, 1), path_probability=(1.0, 0.1))
        built("moe-spec", experts=1, score=score).apply(made)
        found[score] = made.ids.ravel().tolist()

    assert {"sum": [2, 2], "path": [0, 0]} == found


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_more_weight_never_means_more_misses(seed):
    probs, resident = drawn(seed)
    misses = []
    for weight in (0.0, 0.1, 0.3, 0.6, 1.0):
        made = routing(probs, 3, resident)
        built("substitute", weight=weight).apply(made)
        misses.append(int((~resident[made.ids]).sum()))

    assert misses == sorted(misses, reverse=True)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, EXPERTS), tokens=st.integers(1, 6))
def test_a_shortlist_bounds_what_a_batch_uses(seed, budget, tokens):
    probs, resident = drawn(seed, tokens)
    listed = set(np.argsort(-probs.sum(axis=0), kind="stable")[:budget].tolist())
    for policy in ("substitution", "truncation"):
        made = routing(probs, 3, resident, phase="verify")
        own = made.ids.copy()

        built("moe-spec", experts=budget, policy=policy).apply(made)

        assert set(made.ids[~made.dead].tolist()) <= listed
        for token in range(tokens):
            live = made.ids[token][~made.dead[token]].tolist()
            best = [e for e in made.ranking[token].tolist() if e in listed][:3]
            natural = [e for e in own[token].tolist() if e in listed]
            assert set(live) == set(best) if policy == "substitution" else set(live) == set(natural or best[:1])


def test_drop_cold_skips_what_is_small_and_missing_but_never_the_best():
    probs = np.array([[0.4, 0.3, 0.2, 0.1]], np.float32)
    resident = np.array([False, True, False, False])
    made = routing(probs, 4, resident)

    built("drop-cold", share=1.0).apply(made)

    assert [[False, False, True, True]] == made.dead.tolist()


# ---- in an engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


def table(path: Path, *knobs: Any, **sections: Any) -> dict[str, Any]:
    model = {"path": str(path), "threads": 1, "ctx": 128, "ubatch": 16}
    return {"model": model, "cache": {"policy": "lru", "budget_mb": 1}, "routing": list(knobs), **sections}


def rows(engine: Engine, tokens: range = range(3, 11)) -> np.ndarray:
    """The logits after each of some tokens, decoded one by one."""
    with engine.conversation() as conversation:
        made = []
        for token in tokens:
            conversation.feed([token], "decode")
            made.append(conversation.logits())
    return np.array(made)


def with_fewer(path: Path, used: int, folder: Path) -> Path:
    """The same file with another ``expert_used_count``."""
    copy = folder / f"{path.stem}-{used}.gguf"
    shutil.copy(path, copy)
    reader = gguf.GGUFReader(str(copy), "r+")
    field = reader.fields[f"{reader.fields['general.architecture'].contents()}.expert_used_count"]
    field.parts[field.data[0]][0] = used
    reader.data.flush()
    return copy


@pytest.mark.parametrize("arch", ["tiny-qwen3moe", "tiny-deepseek2", "tiny-gpt-oss", "tiny-granitemoe", "tiny-gemma4"])
def test_top_k_equals_a_file_with_fewer_experts(models, tmp_path, arch):
    path = models.path(arch)
    knob = {"plugin": "top-k", "options": {"k": 1}}
    with open_engine(table(path, knob)) as engine, open_engine(table(with_fewer(path, 1, tmp_path))) as fewer:
        assert np.array_equal(rows(engine), rows(fewer))


@pytest.mark.parametrize("used", [1, 2, 3])
def test_without_making_up_it_equals_one_where_weights_are_taken_as_they_are(models, tmp_path, used):
    path = models.path("tiny-olmoe")
    knob = {"plugin": "top-k", "options": {"k": used, "renormalise": False}}
    with open_engine(table(path, knob)) as engine, open_engine(table(with_fewer(path, used, tmp_path))) as fewer:
        assert np.array_equal(rows(engine), rows(fewer))


class Mixed:
    """Leaves one slot out with and one without the others making up for it."""

    phases = frozenset({"decode", "prefill"})
    wants: frozenset[str] = frozenset()

    def __init__(self, dead: int, mute: int) -> None:
        self.dead, self.mute = dead, mute
        self.shares: list[list[float]] = []

    def apply(self, routing: Routing, /) -> None:
        self.shares.append(routing.shares[-1].tolist())
        routing.dead[:, self.dead], routing.mute[:, self.mute] = True, True


def test_weights_are_what_they_are_said_to_be(models):
    """One slot is dead and one mute: the rest has its share of what is not dead, and the graph computes that."""
    for arch, whole in (("tiny-olmoe", False), ("tiny-gpt-oss", True), ("tiny-deepseek2", True), ("tiny-laguna", True)):
        plan = resolve(table(models.path(arch)))
        used = plan.facts.n_used
        policy = Mixed(used - 1, used - 2) if used > 2 else Mixed(1, 1)
        provider = Provider("mixed", lambda options, facts, policy=policy: policy, Options, lossy=True)
        choice = Choice("routing", "mixed", provider, Options(), "routing.0.plugin")
        engine = Engine(replace(plan, routing=(choice,)), seam="python")
        seen: list[np.ndarray] = []
        with engine:
            knobs = engine.stream.knobs
            write = knobs.weigh

            def weigh(write=write, knobs=knobs, engine=engine, seen=seen):
                write()
                if knobs._open is None:
                    seen.append(weights(engine.seam.node, 1, engine.facts.n_used)[-1].copy())

            engine.seam.weigh = weigh
            rows(engine, range(3, 6))
        assert seen
        for found, shares in zip(seen, policy.shares, strict=True):
            live = [i for i in range(used) if i not in (policy.dead, policy.mute)]
            assert found[policy.dead] == found[policy.mute] == 0
            kept = [shares[i] for i in live]
            got = found[live] / found[live].sum()
            assert np.allclose(got, np.array(kept) / sum(kept), atol=1e-5)
            if whole and policy.dead != policy.mute:
                scale = found[live].sum() / (sum(kept) / (1 - shares[policy.dead]))
                assert scale == pytest.approx(round(scale * 2) / 2, rel=1e-4)  # what the architecture scales by


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 1.0])
def test_with_room_for_all_experts_nothing_is_skipped(models, share):
    """Once everything is in memory, what looks at residency changes nothing."""
    path = models.path("tiny-qwen3moe")
    sections = {"cache": {"policy": "lru", "budget_mb": 64}}
    knobs = (
        {"plugin": "drop-cold", "options": {"share": share}},
        {"plugin": "substitute", "options": {"weight": share}},
    )
    with open_engine(table(path, *knobs, **sections)) as engine, open_engine(table(path, **sections)) as plain:
        with engine.conversation() as conversation:
            for token in range(120):
                conversation.feed([token])  # as a prompt, where they do not act
        for bank, facts in enumerate(engine.facts.banks):
            first = engine.seam.entry_base[bank]
            missing = [e for e in range(facts.n_expert) if not engine.seam.resident[first + e]]
            assert not missing, "the prompt did not bring in every expert"
        assert np.array_equal(rows(engine), rows(plain))


def test_loss_is_in_the_records(models):
    path = models.path("tiny-qwen3moe")
    knob = {"plugin": "top-k", "options": {"k": 1}}
    with open_engine(table(path, knob)) as engine, engine.conversation() as conversation:
        records = [token.record for token in conversation.generate([5, 6, 7], 5)]
        summary = conversation.summary
    assert summary is not None
    layers = len(engine.facts.banks)
    assert all(record.dropped == layers for record in records[1:])
    assert all(0 < record.lost_mass < 1 for record in records)
    assert summary.lost_mass == pytest.approx(np.mean([record.lost_mass for record in records[1:]]))
    assert max(record.lost_mass for record in records) <= summary.worst_lost_mass + 1e-9 < 1
    assert summary.substituted == 0
    assert summary.lossy


def test_without_policies_there_is_no_loss_to_speak_of(models):
    with open_engine(table(models.path("tiny-qwen3moe"))) as engine, engine.conversation() as conversation:
        records = [token.record for token in conversation.generate([5, 6, 7], 3)]
        summary = conversation.summary
    assert summary is not None
    assert summary.lost_mass is summary.worst_lost_mass is summary.dropped is None
    assert all(record.lost_mass is None for record in records)


def test_a_trace_shows_what_computed(models, tmp_path):
    trace = tmp_path / "t.csv"
    knob = {"plugin": "top-k", "options": {"k": 1}}
    with open_engine(table(models.path("tiny-qwen3moe"), knob, trace={"route": str(trace)})) as engine:
        rows(engine)
        assert engine.stream.store.counters.lookups > 0
    body = [line.split(",") for line in trace.read_text().splitlines() if line and line[0].isdigit()]
    pairs: dict[tuple[str, ...], set[str]] = {}
    for line in body:
        pairs.setdefault(tuple(line[:4]), set()).add(line[5])
    assert pairs
    assert all(len(experts) == 1 for experts in pairs.values())


def test_the_marks_are_in_the_run_record(models):
    knob = {"plugin": "drop-cold", "options": {"share": 0.5}}
    with open_engine(table(models.path("tiny-qwen3moe"), knob)) as engine:
        record = engine.record
    assert record.lossy
    (shown,) = record.resolved["routing"]
    assert ("drop-cold", True) == (shown["name"], shown["lossy"])
    json.dumps(dict(record.resolved))


def test_a_decode_that_no_policy_acts_on_enters_python_for_misses_alone(models):
    """As without policies: once all is in memory, no routing of a generated token is looked at."""
    knob = {"plugin": "top-k", "options": {"k": 1, "scope": "prefill"}}
    room = {"cache": {"policy": "lru", "budget_mb": 64}}
    with open_engine(table(models.path("tiny-qwen3moe"), knob, **room)) as engine:
        with engine.conversation() as conversation:
            for token in range(120):
                conversation.feed([token], "decode")
        seen: list[int] = []
        engine.seam.handler = lambda bank, keys: seen.append(bank)
        rows(engine)
        assert not seen
        engine.seam.handler = engine.stream.route
        with engine.conversation() as conversation:
            conversation.feed([5])
        assert engine.stream.knobs.counters.dropped > 0
