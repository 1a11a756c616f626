"""A model's routers, read from its file, rank the experts as llama.cpp does; what cannot be ranked by is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe.contracts import BatchContext, ExpertKey
from bmoe.engine import Engine
from bmoe.errors import ModelError
from bmoe.resolve import resolve
from bmoe.routers import Router, gate, read_routers
from bmoe.testing.models import TinyModels

PROMPT = [5, 17, 3, 40, 7, 9, 2, 23]
ARCHS = {
    "tiny-qwen3moe": 1.0,
    "tiny-gpt-oss": 1.0,  # a bias, softmax of the selected
    "tiny-glm4moe": 1.0,  # a selection bias
    "tiny-deepseek2": 1.0,  # groups of experts
    "tiny-bailingmoe2": 1.0,
    "tiny-hy_v3": 1.0,
    "tiny-kimi-k3": 1.0,
    "tiny-nemotron_h_moe": 1.0,
    "tiny-gemma4": 0.9,  # a scale of the router's input, part of which the graph overwrites
}
"""Models and the share of the chosen experts that has to be found."""


@dataclass
class Looking:
    """Notes of each routing what the router saw, and what it chose."""

    stream: Any
    seen: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)

    def begin(self, batch: BatchContext, /) -> None: ...

    def routing(self, bank: int, keys: Sequence[ExpertKey], /) -> None:
        sight = self.stream.sight(bank)
        if sight.facts.bank == 0:
            assert sight.activation is not None
            self.seen.append((sight.facts.layer, np.array(sight.activation), np.array(sight.ids)))

    def handled(self, bank: int, /) -> None: ...

    def accepted(self, kept, /) -> None: ...

    def end(self, complete: bool, /) -> None: ...


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


def watched(path: Path) -> tuple[Any, list[tuple[int, np.ndarray, np.ndarray]]]:
    plan = resolve({"model": {"path": str(path), "threads": 1, "ctx": 128}, "cache": {"policy": "lru", "budget_mb": 4}})
    with Engine(plan) as engine, engine.conversation() as conversation:
        assert engine.stream is not None
        looking = Looking(engine.stream)
        engine.stream.watch(looking)
        assert list(conversation.generate(PROMPT, 4))
        return engine.facts, looking.seen


@pytest.mark.parametrize("like", ARCHS)
def test_a_layers_own_router_on_its_own_input_chooses_what_the_model_chose(models: TinyModels, like: str) -> None:
    facts, seen = watched(models.path(like))
    routers = read_routers(facts)
    asked = right = 0
    for layer, inputs, ids in seen:
        for x, chosen in zip(inputs, ids, strict=True):
            asked += len(chosen)
            right += len(set(chosen.tolist()) & set(routers[layer].rank(x)[: len(chosen)].tolist()))

    assert asked > 40
    assert right >= 0.99 * ARCHS[like] * asked


def test_the_matrix_is_mapped_and_what_it_gives_is_its_product(models: TinyModels) -> None:
    facts, seen = watched(models.path())
    router = read_routers(facts)[facts.banks[0].layer]
    x = seen[0][1][0]

    assert isinstance(router.weight, np.memmap)
    assert not router.weight.flags.writeable
    assert router.weight.shape == (facts.n_expert, facts.n_embd)
    np.testing.assert_allclose(router.logits(x), np.array(router.weight) @ x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stored", ["<f4", "<f2", "bf16"])
def test_every_type_that_a_router_is_stored_in_gives_the_same_ranking(stored: str) -> None:
    draw = np.random.default_rng(0)
    whole = draw.standard_normal((32, 64), dtype=np.float32)
    whole = (whole.view(np.uint32) & 0xFFFF0000).view(np.float32)  # exact in bfloat16
    weight = (whole.view(np.uint32) >> 16).astype("<u2") if stored == "bf16" else whole.astype(stored)
    x = draw.standard_normal(64, dtype=np.float32)

    np.testing.assert_array_equal(Router(0, weight).rank(x)[:8], np.argsort(-(whole @ x))[:8])


def test_groups_are_chosen_by_their_two_best_experts() -> None:
    router = Router(0, np.eye(8, dtype=np.float32), "softmax-of-selected", groups=4, groups_used=2)
    x = np.array([9, 0, 5, 5, 6, 3, 1, 1], dtype=np.float32)

    # sums 9, 10, 9, 2: of the two that are equal the first stays
    assert router.rank(x)[:4].tolist() == [0, 2, 3, 1]
    assert np.isneginf(router.scores(x)[4:]).all()


@pytest.mark.parametrize("gating", ["softmax", "sigmoid", "sqrt-softplus", "softmax-of-selected", "unknown"])
def test_a_gating_function_keeps_the_order_and_a_selection_bias_is_added_after_it(gating: Any) -> None:
    logits = np.array([0.5, -2, 30, 1], dtype=np.float32)
    assert np.argsort(-gate(logits, gating)).tolist() == [2, 3, 0, 1]
    bias = np.array([0, 100, 0, 0], dtype=np.float32)
    router = Router(0, np.eye(4, dtype=np.float32), gating, selection_bias=bias)
    assert router.rank(logits).tolist() == [1, 2, 3, 0]


def test_an_input_is_taken_over_with_the_scale_of_the_layer_that_ranks() -> None:
    eye = np.eye(2, dtype=np.float32)
    one = Router(0, eye, input_scale=np.array([2, 0], dtype=np.float32))
    two = Router(1, eye, input_scale=np.array([3, 5], dtype=np.float32))

    assert two.translate(np.array([4, 0], dtype=np.float32), one).tolist() == [6, 0]
    assert two.translate(np.array([4, 1], dtype=np.float32), Router(2, eye)).tolist() == [4, 1]


def test_what_cannot_be_ranked_by_is_refused_in_one_line(models: TinyModels) -> None:
    facts = resolve({"model": {"path": str(models.path())}}).facts
    name = f"blk.{facts.banks[0].layer}.ffn_gate_inp.weight"

    def with_router(**change: Any) -> Any:
        return replace(facts, dense=tuple(replace(t, **change) if t.name == name else t for t in facts.dense))

    for changed, said in (
        (with_router(type_name="Q8_0"), f"{name} is of type Q8_0; only F32, F16, BF16"),
        (with_router(name="other"), f"{name} is missing"),
        (with_router(shape=(1, 2)), f"{name} has the shape [1, 2]"),
        (with_router(offset=1 << 40), f"{name} cannot be mapped"),
        (replace(facts, n_group=3, n_group_used=1), "1 of 3 groups of"),
    ):
        with pytest.raises(ModelError) as caught:
            read_routers(changed)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="from a table by token"):
        read_routers(resolve({"model": {"path": str(models.path("tiny-deepseek4"))}}).facts)
