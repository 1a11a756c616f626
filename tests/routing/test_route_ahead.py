"""Route-ahead: the experts of a layer are what its router chooses for an earlier layer's input, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe.choices import Choice
from bmoe.contracts import Options, Provider, Routing
from bmoe.engine import Engine
from bmoe.errors import PluginError, ProfileError
from bmoe.resolve import resolve
from bmoe.routers import read_routers
from bmoe.testing.models import TinyModels


class Spy:
    """Notes what the policies before it left, and what the layer's router saw."""

    phases = frozenset({"decode"})
    wants = frozenset({"activation"})

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int], np.ndarray]] = []

    def apply(self, routing: Routing, /) -> None:
        assert routing.activation is not None
        self.seen.append((routing.layer, routing.ids[0].tolist(), routing.activation[0].copy()))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


def table(path: Path, depth: int, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(path), "threads": 1, "ctx": 64, "ubatch": 16},
        "cache": {"policy": "lru", "budget_mb": 2},
        "prefetch": {"policy": "stale-gate", "options": {"worker": False, "depth": depth}},
        "routing": [{"plugin": "route-ahead", "options": {"depth": depth}}],
        **sections,
    }


@contextmanager
def spied(path: Path, depth: int) -> Iterator[tuple[Engine, Spy]]:
    plan, spy = resolve(table(path, depth)), Spy()
    provider = Provider("spy", lambda options, facts: spy, Options)
    choice = Choice("routing", "spy", provider, Options(), "routing.1.plugin")
    with Engine(replace(plan, routing=(*plan.routing, choice))) as engine:
        yield engine, spy


@pytest.mark.parametrize("arch", ["tiny-qwen3moe", "tiny-deepseek2", "tiny-gpt-oss"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_layer_has_what_its_router_chooses_for_an_earlier_input(models, arch, depth):
    with spied(models.path(arch), depth) as (engine, spy):
        routers = read_routers(engine.facts)
        with engine.conversation() as conversation:
            conversation.feed([3, 4, 5])
            for token in range(6, 12):
                conversation.feed([token], "decode")
    layers, per_token = sorted(routers), len(routers)
    assert 6 * per_token == len(spy.seen)
    ahead = 0
    for index, (layer, ids, x) in enumerate(spy.seen):
        at, router = layers.index(layer), routers[layer]
        if at >= depth:
            earlier = layers[at - depth]
            x = router.translate(spy.seen[index - depth][2], routers[earlier])
            ahead += set(ids) != set(router.rank(spy.seen[index][2])[: len(ids)].tolist())
        assert set(router.rank(x)[: len(ids)].tolist()) == set(ids)
    assert ahead, "the earlier input never chose otherwise: nothing was tested"


def test_without_the_prefetcher_that_reads_it_there_is_no_point(models):
    made = table(models.path("tiny-qwen3moe"), 1)
    del made["prefetch"]
    with pytest.raises(ProfileError) as caught:
        resolve(made)

    (line,) = str(caught.value).splitlines()
    assert 'routing.0.plugin = "route-ahead" needs prefetch:stale-gate; choose it' in line


def test_a_ranking_that_is_not_the_models_own_is_refused(models):
    """Here because the routers that it reads are those of another model."""
    other = read_routers(resolve(table(models.path("tiny-qwen3moe", seed=1), 1)).facts)
    with spied(models.path("tiny-qwen3moe"), 1) as (engine, _), engine.conversation() as conversation:
        engine.hot.routing[0]._routers = other
        told = "cannot rank this model's experts: its ranking agrees with .* of 4[89]"
        with pytest.raises(PluginError, match=told):
            _ = [conversation.feed([token], "decode") for token in range(3, 30)]


@pytest.mark.parametrize(
    ("depths", "told"),
    [
        ([2], "route-ahead has depth = 2 and prefetch.options.depth = 1; make them the same"),
        ([4], "route-ahead looks 4 layers ahead of 4; give at most 3"),
        ([1, 1], "route-ahead is there twice; leave one of them out"),
    ],
)
def test_what_would_do_nothing_is_refused(models, depths, told):
    made = table(models.path("tiny-qwen3moe"), 1)
    made["routing"] = [{"plugin": "route-ahead", "options": {"depth": depth}} for depth in depths]
    with pytest.raises(ProfileError) as caught:
        resolve(made)

    (line,) = str(caught.value).splitlines()
    assert told in line


def test_after_another_policy_it_still_knows_the_models_own_choice(models):
    """Its check, and that of the prefetcher, are of what the model chose, not of what became of it."""
    made = table(models.path("tiny-qwen3moe"), 1)
    made["routing"] = [{"plugin": "substitute", "options": {"weight": 1.0}}, *made["routing"]]
    with Engine(resolve(made)) as engine, engine.conversation() as conversation:
        for token in range(3, 43):
            conversation.feed([token], "decode")
        assert engine.stream.knobs.counters.substituted > 0
        assert engine.stream.lane._prefetcher.note == ""
