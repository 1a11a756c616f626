"""The routers of a model as its files hold them: how a layer would rank its experts for a given input.

For plugins that look ahead: the router of a later layer on the input of an earlier one. The rule is that of
``llm_graph_context::build_moe_ffn`` in llama.cpp's src/llama-graph.cpp: logits, the router's bias, the gating function,
the bias of the choice alone, and the best groups of experts before the best experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.contracts import Gating, ModelFacts, TensorFacts
from bmoe.errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STORED: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_LOWEST = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Router:
    """One layer's router. ``weight`` is [n_expert, n_embd] as it lies in the file, mapped and not copied.

    ``bias`` is added to the logits, ``selection_bias`` to what is ranked; both are float32 [n_expert]. ``input_scale``,
    float32 [n_embd], is what the graph has multiplied this layer's input by; ``groups`` of experts are ranked first, of
    which ``groups_used`` are left (0 where there are none).
    """

    layer: int
    weight: NDArray[Any]
    gating: Gating = "softmax"
    bias: NDArray[np.float32] | None = None
    selection_bias: NDArray[np.float32] | None = None
    input_scale: NDArray[np.float32] | None = None
    groups: int = 0
    groups_used: int = 0

    def logits(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of one input, float32 [n_embd]: float32 [n_expert]. Takes one thread and lets others run meanwhile."""
        weight = self.weight
        if weight.dtype == np.uint16:  # bfloat16: the upper half of a float32
            weight = (weight.astype(np.uint32) << 16).view(np.float32)
        # not `@`: a BLAS would start threads for it, which compete with those that decode
        product: NDArray[np.float32] = np.einsum("en,n->e", weight.astype(np.float32, copy=False), x)
        if self.bias is not None:
            product += self.bias
        return product

    def scores(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the experts are ranked by for one input, float32 [n_expert]; -inf in groups that are ruled out.

        Without selection bias and groups these are the logits, since every gating function keeps their order.
        """
        scores = self.logits(x)
        if self.selection_bias is None and not self.groups:
            return scores
        scores = gate(scores, self.gating)
        if self.selection_bias is not None:
            scores = scores + self.selection_bias
        if self.groups:
            of_group = scores.reshape(self.groups, -1)
            best_two = np.sort(of_group, axis=1)[:, -2:].sum(axis=1)
            out = np.argsort(-best_two, kind="stable")[self.groups_used :]
            of_group[out] = _LOWEST
        return scores

    def rank(self, x: NDArray[np.float32]) -> NDArray[np.int64]:
        """All experts for one input, float32 [n_embd], best first; of equals the lower number."""
        return np.argsort(-self.scores(x), kind="stable")

    def translate(self, x: NDArray[np.float32], source: Router) -> NDArray[np.float32]:
        """The input that ``source`` saw as this router would see it: with its own scale in place of the other's."""
        if self.input_scale is None or source.input_scale is None:
            return x
        plain = np.zeros(len(x), dtype=np.float32)
        np.divide(x, source.input_scale, out=plain, where=source.input_scale != 0)
        plain *= self.input_scale
        return plain


def gate(logits: NDArray[np.float32], gating: Gating) -> NDArray[np.float32]:
    """What a gating function makes of logits, float32 [n_expert]; the logits where it comes after the choice."""
    if gating == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-logits)), dtype=np.float32)
    if gating == "sqrt-softplus":
        return np.asarray(np.sqrt(np.logaddexp(np.float32(0), logits)), dtype=np.float32)
    if gating == "softmax":
        shares = np.exp(logits - logits.max())
        return np.asarray(shares / shares.sum(), dtype=np.float32)
    return np.array(logits, dtype=np.float32)


def read_routers(facts: ModelFacts) -> dict[int, Router]:
    """The routers of all routed layers of the trunk, by layer; reads only what is not a matrix.

    Raises ModelError, one line, if a router cannot be used: it is not in the file, of a quantised type, or the layer
    takes its experts from a table.
    """
    tensors = {tensor.name: tensor for tensor in facts.dense}
    layers = sorted({bank.layer for bank in facts.banks})
    return {layer: _router(facts, tensors, layer) for layer in layers}


def _router(facts: ModelFacts, tensors: Mapping[str, TensorFacts], layer: int) -> Router:
    name = f"blk.{layer}.ffn_gate_inp.weight"
    if f"blk.{layer}.ffn_gate_tid2eid.weight" in tensors:
        raise ModelError(f"{facts.path}: layer {layer} takes its experts from a table by token, not by a router")
    found = tensors.get(name)
    shape = (facts.n_embd, facts.n_expert)
    if found is None or found.shape != shape:
        seen = "is missing" if found is None else f"has the shape {list(found.shape)}, not {list(shape)}"
        raise ModelError(f"{facts.path}: the router {name} {seen}; leave out what ranks experts by it")
    groups = facts.n_group if facts.n_group > 1 else 0
    if groups and (facts.n_expert % groups or facts.n_expert < 2 * groups or not 0 < facts.n_group_used <= groups):
        said = f"{facts.n_group_used} of {groups} groups of {facts.n_expert} experts"
        raise ModelError(f"{facts.path}: {said} cannot be chosen; convert the model again")
    return Router(
        layer,
        _mapped(facts, found),
        facts.gating,
        _vector(facts, tensors, layer, "ffn_gate_inp.bias", facts.n_expert),
        _vector(facts, tensors, layer, "exp_probs_b.bias", facts.n_expert)
        if f"blk.{layer}.exp_probs_b.bias" in tensors
        else _vector(facts, tensors, layer, "exp_probs_b", facts.n_expert),
        _vector(facts, tensors, layer, "ffn_gate_inp.scale", facts.n_embd),
        groups,
        facts.n_group_used if groups else 0,
    )


def _mapped(facts: ModelFacts, tensor: TensorFacts) -> NDArray[Any]:
    path, stored = facts.shards[tensor.shard].path, _STORED.get(tensor.type_name)
    if stored is None:
        known = ", ".join(_STORED)
        raise ModelError(f"{path}: {tensor.name} is of type {tensor.type_name}; only {known} can be ranked by")
    try:
        return np.memmap(path, stored, "r", tensor.offset, tuple(reversed(tensor.shape)))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {tensor.name} cannot be mapped ({error}); check the file") from error


def _vector(
    facts: ModelFacts, tensors: Mapping[str, TensorFacts], layer: int, suffix: str, length: int
) -> NDArray[np.float32] | None:
    tensor = tensors.get(f"blk.{layer}.{suffix}")
    if tensor is None:
        return None
    stored = _mapped(facts, tensor).reshape(-1)
    if len(stored) != length:
        raise ModelError(f"{facts.path}: {tensor.name} has {len(stored)} numbers, not {length}; convert it again")
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return np.array(stored, dtype=np.float32)
