"""What stale-gate does beside its gate: it checks itself, waits for nobody, and keeps what it expects in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe.contracts import key_parts
from bmoe.engine import Engine
from bmoe.errors import ProfileError
from bmoe.resolve import resolve
from bmoe.routers import Router
from bmoe.synth import SHAPES
from bmoe.testing import traces
from bmoe.testing.inputs import Inputs
from bmoe.testing.load import load_provider
from bmoe.testing.models import TinyModels
from bmoe_plugins.prefetch._newest import NewestFirst


@pytest.fixture(name="inputs", scope="module")
def _inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("models"))


@pytest.fixture(name="build")
def _build(inputs: Inputs) -> Iterator[Callable[..., Any]]:
    built: list[Any] = []

    def build(**options: Any) -> Any:
        provider = load_provider("prefetch", "bmoe", "stale-gate")
        built.append(provider.build(provider.options(**options), inputs.facts))
        return built[-1]

    yield build
    for each in built:
        each.close()


def test_it_suggests_what_the_routers_of_the_next_two_layers_choose(build, inputs: Inputs) -> None:
    gate, steady = build(worker=False), inputs.steady()
    for seen in steady[:2]:
        gate.observe(seen.event())

    suggested = [(p.layer, p.expert) for p in map(key_parts, gate.suggest(1))]

    assert suggested == [(layer, e) for layer in (2, 3) for e in steady[layer].ids[0].tolist()]
    assert gate.suggest(traces.LAYERS - 1) == []


def test_reading_and_keeping_are_capped_apart(build, inputs: Inputs) -> None:
    gate = build(worker=False, reads=0, keep=5)
    for seen in inputs.steady()[:1]:
        gate.observe(seen.event())

    assert gate.suggest(0) == []
    assert len(gate.retain(0)) == 5


def test_a_ranking_that_is_not_the_models_own_ends_it_within_the_first_tokens(build, inputs: Inputs) -> None:
    gate = build(worker=False)
    for seen in list(inputs.random(1))[: 3 * traces.LAYERS]:
        gate.observe(replace(seen, ids=(seen.ids + 1) % traces.EXPERTS).event())

    assert "agrees with" in gate.note
    assert all(gate.suggest(layer) == [] for layer in range(traces.LAYERS))


def test_without_the_routers_input_it_says_so_and_suggests_nothing(build, inputs: Inputs) -> None:
    gate = build()
    gate.observe(replace(next(iter(inputs.random(1))), x=None).event())

    assert "does not show what the router of layer 0 sees" in gate.note
    assert gate.suggest(0) == []


def test_a_prompt_is_not_ranked(build, inputs: Inputs) -> None:
    gate = build(worker=False)
    event = inputs.steady()[0].event()
    gate.observe(replace(event, batch=replace(event.batch, phase="prefill")))

    assert gate.suggest(0) == []


def test_a_worker_for_the_next_layer_is_refused_by_name(tmp_path: Path) -> None:
    table = {
        "model": {"path": str(TinyModels(tmp_path).path())},
        "prefetch": {"policy": "stale-gate", "options": {"depth": 1}},
        "cache": {"policy": "lru", "budget_mb": 1},
    }
    with pytest.raises(ProfileError, match="depth = 1 is ranked too late by a worker; set worker = false"):
        resolve(table)


def test_nobody_waits_for_the_worker_and_the_newest_job_replaces_one_that_waits() -> None:
    begun, go, done = threading.Event(), threading.Event(), list[int]()

    def work(job: int) -> None:
        begun.set()
        assert go.wait(10)
        done.append(job)

    worker = NewestFirst(work)
    worker.submit(1)
    assert begun.wait(10)
    worker.submit(2)
    worker.submit(3)
    assert done == []
    go.set()
    worker.wait()
    assert done == [1, 3]
    worker.close()
    worker.close()
    worker.submit(4)
    worker.wait()
    assert done == [1, 3]


def test_what_a_job_raises_is_raised_where_its_result_is_asked_for(build, inputs: Inputs) -> None:
    gate = build()
    gate._routers = {layer: Router(layer, np.zeros((2, 3), dtype=np.float32)) for layer in gate._routers}
    gate._seen = gate._checked = 10**6  # past the checks of its own
    gate.observe(inputs.steady()[0].event())
    gate.wait()

    with pytest.raises(ValueError, match="einsum|operand|broadcast"):
        gate.suggest(0)
    gate.suggest(0)


def test_closing_an_engine_ends_its_thread(tmp_path: Path) -> None:
    shape = replace(SHAPES["tiny-qwen3moe"], name="many", n_expert=48, n_embd=128, n_ff_exp=128)
    table = {
        "model": {"path": str(TinyModels(tmp_path).path(shape, "F32")), "threads": 1, "ctx": 128},
        "prefetch": {"policy": "stale-gate"},
        "cache": {"policy": "lru", "budget_mb": 14, "watch": "off"},
    }
    with Engine(resolve(table)) as engine:
        assert engine.hot.prefetcher is not None
        with engine.conversation() as conversation:
            assert list(conversation.generate([5, 17, 3], 8))
        assert any(thread.name == "bmoe-ranking" for thread in threading.enumerate())

    assert not any(thread.name == "bmoe-ranking" for thread in threading.enumerate())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads of the process in /proc")
def test_a_product_starts_no_threads() -> None:
    router = Router(0, np.ones((128, 2048), dtype=np.float32))
    before = len(os.listdir("/proc/self/task"))
    router.rank(np.ones(2048, dtype=np.float32))
    assert len(os.listdir("/proc/self/task")) == before


def test_what_is_retained_is_given_up_last(tmp_path: Path) -> None:
    shape = replace(SHAPES["tiny-qwen3moe"], name="many", n_expert=48, n_embd=128, n_ff_exp=128)
    table = {
        "model": {"path": str(TinyModels(tmp_path).path(shape, "F32")), "threads": 1, "ctx": 128},
        "prefetch": {"policy": "temporal"},
        "cache": {"policy": "lru", "budget_mb": 14, "watch": "off"},
    }
    with Engine(resolve(table)) as engine:
        assert engine.stream is not None
        store: Any = engine.stream.store
        with engine.conversation() as conversation:
            assert list(conversation.generate([5, 17, 3], 8))
        oldest = store._victim(set())
        store.retain([oldest])
        other = store._victim({oldest})
        assert store._evict(set())
        assert other in store._evicted
        assert oldest not in store._evicted
        held = [key for base in store._key_base for key in range(base, base + 48)]
        store.retain(held)  # all of them: then it is as if there were none
        assert store._evict(set())
        assert oldest in store._evicted
