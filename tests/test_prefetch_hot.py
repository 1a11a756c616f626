"""The hot prefetcher against a plain model of its rule, and told by a heat file what earlier runs used."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from bmoe import expert_key
from bmoe.contracts import BatchContext, RoutingEvent, key_parts
from bmoe.engine import open_engine
from bmoe.testing import traces
from bmoe.testing.caches import cache_facts
from bmoe.testing.load import load_provider
from bmoe.testing.models import TinyModels

LAYERS, EXPERTS = traces.LAYERS, traces.EXPERTS


def build(**options: Any) -> Any:
    provider = load_provider("prefetch", "bmoe", "hot")
    return provider.build(provider.options(**options), cache_facts(64))


def event(layer: int, *rows: list[int]) -> RoutingEvent:
    return RoutingEvent(layer, 0, BatchContext("decode", tuple(range(len(rows)))), np.array(rows, dtype=np.int32))


def experts(hot: Any, layer: int) -> list[int]:
    keys = [key_parts(key) for key in hot.suggest(layer)]
    assert {key.layer for key in keys} <= {(layer + 1) % LAYERS}
    return [key.expert for key in keys]


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_weighed_mean_of_uses(seed: int) -> None:
    """Of the first tokens the plain mean, while 1 / n is more than what a token counts later."""
    hot, draw, weight = build(half_life=5, least=0.3), Random(seed), 1 - 2 ** (-1 / 5)
    chances = [0.0] * EXPERTS
    for token in range(60):
        used = draw.sample(range(EXPERTS // 4), 2) + draw.sample(range(EXPERTS // 4, EXPERTS), 2)
        share = max(weight, 1 / (token + 1))
        chances = [chance * (1 - share) + share * (e in used) for e, chance in enumerate(chances)]
        hot.observe(event(1, used))
        found = experts(hot, 0)
        assert set(found) == {e for e, chance in enumerate(chances) if chance >= 0.3}
        assert [chances[e] for e in found] == pytest.approx(sorted((chances[e] for e in found), reverse=True))
    assert found


def test_what_is_not_used_any_more_is_not_hot_after_a_while() -> None:
    hot = build(half_life=4)
    for _ in range(20):
        hot.observe(event(1, [1, 2, 3, 4]))
    found = []
    for _ in range(10):
        found.append(1 in experts(hot, 0))
        hot.observe(event(1, [5, 6, 7, 8]))
    assert found[:8] == [True] * 8, "a quarter is left after two half-lives"
    assert not found[9]


def test_it_begins_with_what_it_is_told() -> None:
    hot = build(half_life=8)
    hot.remember({expert_key(1, 7): 0.9, expert_key(1, 3): 0.5, expert_key(1, 4): 0.1})
    assert experts(hot, 0) == [7, 3]
    hot.observe(event(1, [0, 1, 2, 4]))
    assert experts(hot, 0) == [7, 3], "one token does not outweigh many"


@pytest.mark.parametrize("bad", [{"half_life": 0}, {"least": 1.5}, {"depth": 0}, {"least": float("nan")}])
def test_options_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        build(**bad)


def test_an_engine_tells_it_what_the_heat_file_has(tmp_path: Path) -> None:
    model = str(TinyModels(tmp_path).path("tiny-qwen3moe"))
    with open_engine({"model": {"path": model, "threads": 1}}) as engine:
        half = engine.facts.expert_bytes / 2 / (1 << 20)
    table = {
        "model": {"path": model, "threads": 1, "ctx": 64},
        "cache": {"policy": "lru", "budget_mb": half, "heat": str(tmp_path / "h.json"), "watch": "off"},
        "prefetch": {"policy": "hot", "options": {"least": 0.0}},
    }
    with open_engine(table) as engine:
        assert not engine.hot.prefetcher.suggest(0), "nothing is known yet"
        with engine.conversation() as conversation:
            list(conversation.generate([5, 17, 3], 8))
    with open_engine(table) as engine:
        hot = engine.hot.prefetcher.suggest(0)
        used = engine.warmth._heat.chances()
        assert hot == [key for key in sorted(used, key=lambda key: (-used[key], key)) if key_parts(key).layer == 1]
        assert hot
