"""The shapes that a synthetic model can have, as numbers, and the tensors and metadata that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["embedding", "output", "norm", "weight", "router", "bias", "expert"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's dimensions; the quantisations are names of ggml tensor types.

    ``quant`` is of the routed experts where none is asked for, ``dense`` of attention, ``embedding`` and ``output`` of
    the two vocabulary matrices. ``window`` is the sliding attention window of every other layer, 0 for none.
    ``n_layer`` counts the trunk: its first ``n_dense`` layers have a dense feed-forward of width ``n_ff``. ``n_shared``
    experts are used by every token, and ``n_nextn`` layers for next-token prediction follow the trunk.
    """

    name: str
    arch: str
    n_layer: int
    n_embd: int
    n_expert: int
    n_used: int
    n_ff_exp: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    quant: str
    dense: str
    embedding: str
    output: str
    rope_base: float
    tokenizer: str
    window: int = 0
    n_dense: int = 0
    n_ff: int = 0
    n_shared: int = 0
    n_nextn: int = 0

    @property
    def n_block(self) -> int:
        """Layers of trunk and next-token prediction together."""
        return self.n_layer + self.n_nextn


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            "tiny-qwen3moe", "qwen3moe", 4, 256, 8, 2, 256, 4, 2, 32, 512, 2048,
            quant="Q4_K", dense="F32", embedding="F32", output="F32", rope_base=1e6, tokenizer="qwen2",
        ),
        Shape(
            "tiny-gpt-oss", "gpt-oss", 4, 192, 8, 2, 192, 4, 2, 32, 512, 2048,
            quant="MXFP4", dense="F32", embedding="F32", output="F32", rope_base=150000.0, tokenizer="gpt-4o",
            window=16,
        ),
        # 3 x 96 x 128 weights: an expert of a small trained model, no multiple of a page in any quantisation
        Shape(
            "tiny-glm4moe", "glm4moe", 4, 128, 8, 2, 96, 4, 2, 32, 512, 2048,
            quant="Q8_0", dense="F32", embedding="F32", output="F32", rope_base=1e4, tokenizer="gpt-4o",
            n_dense=1, n_ff=192, n_shared=1, n_nextn=1,
        ),
        Shape(
            "qwen3-30b-a3b", "qwen3moe", 48, 2048, 128, 8, 768, 32, 4, 128, 151936, 40960,
            quant="Q4_K", dense="Q4_K", embedding="Q4_K", output="Q6_K", rope_base=1e6, tokenizer="qwen2",
        ),
        # 2880 is no multiple of 256, so that files of this model have no K-quants
        Shape(
            "gpt-oss-120b", "gpt-oss", 36, 2880, 128, 4, 2880, 64, 8, 64, 201088, 131072,
            quant="MXFP4", dense="Q8_0", embedding="Q8_0", output="Q8_0", rope_base=150000.0, tokenizer="gpt-4o",
            window=128,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to be written: ``shape`` fastest axis first, ``quant`` its ggml type, ``role`` what fills it."""

    name: str
    shape: tuple[int, ...]
    quant: str
    role: Role


def tensors(shape: Shape, quant: str) -> Iterator[TensorPlan]:
    """The tensors of a model in file order; ``shape.n_block`` layers, experts as ``quant``.

    With a head for next-token prediction that is the last of the file, as llama.cpp's quantiser puts it: what is not
    loaded is then at the end, and llama.cpp unmaps it.
    """
    output = (
        TensorPlan("output_norm.weight", (shape.n_embd,), "F32", "norm"),
        TensorPlan("output.weight", (shape.n_embd, shape.n_vocab), shape.output, "output"),
    )
    if shape.n_nextn:
        yield from output
    yield TensorPlan("token_embd.weight", (shape.n_embd, shape.n_vocab), shape.embedding, "embedding")
    for layer in range(shape.n_block):
        parts = [*_attention(shape), *_feed_forward(shape, layer, quant)]
        if layer >= shape.n_layer:
            parts += _prediction(shape)
        for suffix, axes, kind, role in parts:
            yield TensorPlan(f"blk.{layer}.{suffix}", axes, kind, role)
    if not shape.n_nextn:
        yield from output


_Part: TypeAlias = tuple[str, tuple[int, ...], str, Role]


def _attention(shape: Shape) -> Iterator[_Part]:
    embd = shape.n_embd
    query, key = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    biased = {"gpt-oss": ("q", "k", "v", "output"), "glm4moe": ("q", "k", "v")}.get(shape.arch, ())
    yield "attn_norm.weight", (embd,), "F32", "norm"
    for name, n_in, n_out in (("q", embd, query), ("k", embd, key), ("v", embd, key), ("output", query, embd)):
        yield f"attn_{name}.weight", (n_in, n_out), shape.dense, "weight"
        if name in biased:
            yield f"attn_{name}.bias", (n_out,), "F32", "bias"
    if shape.arch == "gpt-oss":
        yield "attn_sinks.weight", (shape.n_head,), "F32", "bias"
    else:
        yield "attn_q_norm.weight", (shape.head_dim,), "F32", "norm"
        yield "attn_k_norm.weight", (shape.head_dim,), "F32", "norm"
    yield "ffn_norm.weight" if shape.arch == "qwen3moe" else "post_attention_norm.weight", (embd,), "F32", "norm"


def _feed_forward(shape: Shape, layer: int, quant: str) -> Iterator[_Part]:
    embd, n_expert = shape.n_embd, shape.n_expert
    if layer < shape.n_dense:
        for name, axes in _gated(embd, shape.n_ff):
            yield f"ffn_{name}.weight", axes, shape.dense, "weight"
        return
    biased = shape.arch == "gpt-oss"
    yield "ffn_gate_inp.weight", (embd, n_expert), "F32", "router"
    if biased:
        yield "ffn_gate_inp.bias", (n_expert,), "F32", "bias"
    if shape.arch == "glm4moe":
        yield "exp_probs_b.bias", (n_expert,), "F32", "bias"
    for name, (n_in, n_out) in _gated(embd, shape.n_ff_exp):
        yield f"ffn_{name}_exps.weight", (n_in, n_out, n_expert), quant, "expert"
        if biased:
            yield f"ffn_{name}_exps.bias", (n_out, n_expert), "F32", "bias"
    if shape.n_shared:
        for name, axes in _gated(embd, shape.n_ff_exp * shape.n_shared):
            yield f"ffn_{name}_shexp.weight", axes, shape.dense, "weight"


def _gated(embd: int, ff: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    return ("gate", (embd, ff)), ("up", (embd, ff)), ("down", (ff, embd))


def _prediction(shape: Shape) -> Iterator[_Part]:
    """What a layer for next-token prediction has beside: it joins a token with the hidden state before it."""
    embd = shape.n_embd
    yield "nextn.eh_proj.weight", (2 * embd, embd), shape.dense, "weight"
    for name in ("enorm", "hnorm", "shared_head_norm"):
        yield f"nextn.{name}.weight", (embd,), "F32", "norm"


def metadata(shape: Shape) -> dict[str, int | float | str]:
    """The architecture's metadata keys, without the tokenizer's; a truth value stays one."""
    keys: dict[str, int | float | str] = {
        "block_count": shape.n_block,
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff or shape.n_ff_exp,
        "expert_feed_forward_length": shape.n_ff_exp,
        "expert_count": shape.n_expert,
        "expert_used_count": shape.n_used,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": shape.rope_base,
    }
    if shape.window:
        keys["attention.sliding_window"] = shape.window
    if shape.arch == "glm4moe":
        keys |= {
            "rope.dimension_count": shape.head_dim // 2,
            "leading_dense_block_count": shape.n_dense,
            "expert_shared_count": shape.n_shared,
            "expert_gating_func": 2,  # sigmoid
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "nextn_predict_layers": shape.n_nextn,
        }
    if shape.name == "gpt-oss-120b":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096}
    return {f"{shape.arch}.{key}": value for key, value in keys.items()}
