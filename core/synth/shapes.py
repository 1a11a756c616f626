"""The dimensions that a synthetic model can have."""

from __future__ import annotations

from dataclasses import dataclass

MIXES = {"Q4_K_M": ("Q4_K", "Q6_K")}
"""Quantisation → the two types that it mixes; the second is that of the down projection in some layers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's dimensions; the quantisations are names of ggml tensor types.

    ``quant`` is of the routed experts where none is asked for, ``dense`` of attention, ``embedding`` and ``output`` of
    the two vocabulary matrices. ``window`` is the sliding attention window of every other layer, 0 for none.
    ``n_layer`` counts the trunk: its first ``n_dense`` layers have a dense feed-forward of width ``n_ff``. ``n_shared``
    experts are used by every token, and ``n_nextn`` layers for next-token prediction follow the trunk. ``fused`` puts
    gate and up of the experts into one tensor, ``tied`` lets the embeddings serve as the matrix of logits.
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
    fused: bool = False
    tied: bool = False

    @property
    def n_block(self) -> int:
        """Layers of trunk and next-token prediction together."""
        return self.n_layer + self.n_nextn

    def quant_of(self, projection: str, layer: int, asked: str) -> str:
        """The type of a layer's experts where the model's is ``asked``, one of :data:`MIXES` or a type itself."""
        usual, finer = MIXES.get(asked, (asked, asked))
        return finer if projection == "down" and layer % 2 else usual


# Dimensions of real models; those of the tiny ones are with their recipes.
REAL = (
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
)  # fmt: skip
