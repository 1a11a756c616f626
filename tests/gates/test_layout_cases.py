"""Every layout of experts that a file can have, each shown on a tiny model that has it and passes the gate.

A case that is no architecture's own tiny model has its gate here; the others are gated as their architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from bmoe.contracts import ModelFacts
from bmoe.header import Value
from bmoe.layout import read_model
from bmoe.registry import load_registry
from bmoe.shards import read_shards
from bmoe.synth import SHAPES, Shape
from bmoe.testing.archs import ArchGates, session_bench

from .graphs import Node, graph_of

ROWS = {row.name: row for row in load_registry().archs}
N_TOKENS = 7
QWEN = SHAPES["tiny-qwen3moe"]
FUSED = replace(SHAPES["tiny-qwen35moe"], name="fused", fused=True)
TIED = replace(QWEN, name="tied", n_expert=6, tied=True)
TOP_1 = replace(QWEN, name="top-1", n_expert=4, n_used=1)
MIXED = replace(QWEN, name="mixed", quant="Q4_K_M")


@dataclass(frozen=True, slots=True)
class Look:
    """A tiny model: what bmoe reads from its file, the file's metadata, and the graph of a prompt."""

    facts: ModelFacts
    values: Mapping[str, Value]
    graph: list[Node]

    @property
    def layers(self) -> list[int]:
        return [bank.layer for bank in self.facts.banks]

    @property
    def suffixes(self) -> set[tuple[str, ...]]:
        return {tuple(p.suffix for p in bank.projections) for bank in self.facts.banks}

    @property
    def routings(self) -> list[Node]:
        """The nodes that hold the experts' numbers, by layer."""
        by_name = {node.name: node for node in self.graph}
        return [by_name[f"ffn_moe_topk-{layer}"] for layer in dict.fromkeys(self.layers)]

    def key(self, name: str) -> Value | None:
        return self.values.get(f"{self.facts.arch}.{name}")

    def having(self, op: str) -> list[Node]:
        return [node for node in self.graph if node.op == op]

    def using(self, weight: str) -> list[Node]:
        return [node for node in self.graph if any(source.name == weight for source in node.sources)]


@pytest.fixture(name="look", scope="module")
def _look(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | Shape], Look]:
    models, known = session_bench(request, tmp_path_factory).models, dict[str, Look]()

    def look(like: str | Shape) -> Look:
        like = SHAPES[f"tiny-{like}"] if isinstance(like, str) else like
        if like.name not in known:
            path = models.path(like)
            facts = read_model(path, ROWS)
            known[like.name] = Look(facts, read_shards(str(path))[0].values, graph_of(facts, N_TOKENS))
        return known[like.name]

    return look


class OfQwen(ArchGates):
    plugin, provider, arch, thorough = "bmoe", "qwen3moe", "qwen3moe", False


# ---- an expert's tensors


def test_gate_and_up_in_one_tensor(look: Any) -> None:
    for like in (FUSED, "gemma4"):
        assert look(like).suffixes == {("ffn_gate_up_exps", "ffn_down_exps")}


class TestGateAndUpInOneTensor(ArchGates):
    plugin, provider, arch, thorough = "bmoe", "qwen35moe", "qwen35moe", False
    shape = FUSED


def test_no_gate(look: Any) -> None:
    seen = look("nemotron_h_moe")
    assert seen.suffixes == {("ffn_up_exps", "ffn_down_exps")}
    assert len(seen.having("MUL_MAT_ID")) == 2 * len(seen.layers)


def test_a_bias_for_each_row_of_each_expert(look: Any) -> None:
    seen = look("gpt-oss")
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        (node,) = seen.using(f"blk.1.{name}.bias")
        assert node.op == "ADD_ID"
        assert seen.routings[1].name in [source.name for source in node.sources]


def test_a_scale_for_each_expert(look: Any) -> None:
    seen = look("gemma4")
    assert (seen.facts.n_expert,) in [t.shape for t in seen.facts.dense if t.name == "blk.1.ffn_down_exps.scale"]
    assert seen.using("blk.1.ffn_down_exps.scale")


def test_two_quantisations_of_experts(look: Any) -> None:
    banks = look(MIXED).facts.banks
    assert [[p.type_name for p in bank.projections] for bank in banks[:2]] == [["Q4_K"] * 3, ["Q4_K", "Q4_K", "Q6_K"]]
    assert len({sum(p.stride for p in bank.projections) for bank in banks}) == 2


class TestTwoQuantisationsOfExperts(OfQwen):
    shape = MIXED


# ---- which layers have experts, and how many


def test_layers_without_experts_between_others(look: Any) -> None:
    assert look("llama4").layers == [1, 3, 5]
    assert look("jamba").layers == [1, 3]


def test_layers_without_experts_at_the_start(look: Any) -> None:
    assert look("deepseek").layers == [1, 2, 3]


def test_a_layer_for_next_token_prediction_is_among_those_that_the_file_counts(look: Any) -> None:
    seen = look("glm4moe")
    assert (seen.key("block_count"), seen.key("nextn_predict_layers")) == (5, 1) == (seen.facts.n_layer, 1)
    assert (seen.layers, [bank.layer for bank in seen.facts.nextn_banks]) == ([1, 2, 3], [4])
    assert not seen.using("blk.4.ffn_up_exps.weight")


def test_two_banks_in_a_layer(look: Any) -> None:
    seen = look("grovemoe")
    counts = [(bank.layer, bank.bank, bank.n_expert) for bank in seen.facts.banks]
    assert counts == [(layer, bank, (8, 4)[bank]) for layer in range(4) for bank in range(2)]
    (one,), (other,) = seen.using("blk.2.ffn_up_exps.weight"), seen.using("blk.2.ffn_up_chexps.weight")
    assert (one.op, one.sources[2].name) == ("MUL_MAT_ID", "ffn_moe_topk-2")
    assert (other.op, other.sources[2].name) == ("MUL_MAT_ID", " (copy)")  # numbers of pairs


def test_counts_and_widths_that_differ_by_layer(look: Any) -> None:
    seen = look("nemotron_h_moe")
    assert seen.key("expert_used_count") == (0, 2, 0, 3, 3)
    assert seen.key("expert_feed_forward_length") == (0, 96, 0, 64, 64)
    assert [bank.n_used for bank in seen.facts.banks] == [2, 3] == [node.ne[0] for node in seen.routings]
    first, second = (bank.projections[0].stride for bank in seen.facts.banks)
    assert 64 * first == 96 * second


# ---- how experts are chosen


@pytest.mark.parametrize("like", ["llama4", TOP_1], ids=["llama4", "qwen3moe"])
def test_one_expert_for_a_token(look: Any, like: str | Shape) -> None:
    seen = look(like)
    assert {bank.n_used for bank in seen.facts.banks} == {1} == {node.ne[0] for node in seen.routings}


class TestOneExpertForAToken(OfQwen):
    shape = TOP_1


@pytest.mark.parametrize("like", ["bailingmoe2", "deepseek2", "deepseek32"])
def test_groups_of_experts_are_chosen_first(look: Any, like: str) -> None:
    seen = look(like)
    chosen = [node.ne[0] for node in seen.graph if node.name.startswith("ffn_moe_group_topk-")]
    assert chosen == [seen.key("expert_group_used_count")] * len(seen.layers)
    assert 0 < chosen[0] < seen.key("expert_group_count")


def test_the_first_layers_take_experts_from_a_table(look: Any) -> None:
    """Not from sorted scores: what observes a routing may not rely on those."""
    kinds = [(node.op, node.view_of) for node in look("deepseek4").routings]
    assert kinds == [("GET_ROWS", "")] * 2 + [("VIEW", "ARGSORT")] * 2


# ---- around the experts


def test_the_embeddings_are_the_matrix_of_logits(look: Any) -> None:
    seen = look(TIED)
    assert not [t.name for t in seen.facts.dense if t.name.startswith("output.")]
    users = seen.using("token_embd.weight")
    assert sorted(node.op for node in users) == ["GET_ROWS", "MUL_MAT"]
    assert len({source.data for node in users for source in node.sources if source.name == "token_embd.weight"}) == 1


class TestTheEmbeddingsAreTheMatrixOfLogits(OfQwen):
    shape = TIED


@pytest.mark.parametrize("like", ["qwen3moe", "glm4moe", "deepseek2", "jamba"])
def test_the_last_layer_computes_only_what_is_asked_for(look: Any, like: str) -> None:
    *others, last = [node.ne[1] for node in look(like).routings]
    assert (set(others), last) == ({N_TOKENS}, 1)


def test_recurrent_layers_between_those_with_attention(look: Any) -> None:
    seen = look("jamba")
    assert (len(seen.having("SSM_SCAN")), len(seen.having("FLASH_ATTN_EXT"))) == (3, 1)
    assert seen.key("attention.head_count_kv") == (0, 0, 2, 0)


def test_a_window_in_every_other_layer(look: Any) -> None:
    seen = look("gpt-oss")
    assert 0 < seen.key("attention.sliding_window") < 40  # tokens of the gate's longest prompt
    first, *others = [node.sources[3].address for node in seen.having("FLASH_ATTN_EXT")]  # masks
    assert [mask == first for mask in others] == [False, True, False]
