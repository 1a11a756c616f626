"""IBM's models. Tensors and metadata: ``src/models/granite*.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def granitemoe(m: Recipe) -> None:
    """Granite-3.1-1B-A400M, 3B-A800M, and the form with shared experts: embeddings, residuals, logits are scaled."""
    _scales(m)
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention()
        layer.norm("ffn_norm")
        layer.router()
        layer.experts()
        layer.shared()
    m.output()


def granite_swa(m: Recipe) -> None:
    """GraniteMoeSWA: a window in three layers of four, attention sinks, gate and up in one tensor, shared ones too."""
    _scales(m)
    numbers, width = range(m.shape.n_layer), m.shape.n_ff_exp
    m.keys |= {"attention.sliding_window_pattern": [n % 4 != 0 for n in numbers]}
    m.keys |= {"attention.rope_pattern": [n % 4 != 0 for n in numbers]}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention()
        layer.tensor("attn_sinks.weight", (m.shape.n_head,), "bias")
        layer.norm("ffn_norm")
        layer.router()
        layer.experts()
        layer.matrix("ffn_up_shexp", m.shape.n_embd, 2 * width)
        layer.matrix("ffn_down_shexp", width, m.shape.n_embd)
    m.output()


def _scales(m: Recipe) -> None:
    m.keys |= {"embedding_scale": 1.5, "residual_scale": 0.7, "logit_scale": 6.0, "attention.scale": 0.015625}
    m.keys |= {"rope.dimension_count": m.shape.head_dim, "expert_shared_feed_forward_length": m.shape.n_ff_exp}


ARCHITECTURES = (
    architecture("granitemoe", granitemoe, n_ff=0, n_shared=1),
    architecture("granite", granitemoe, n_ff=0, n_shared=1),
    architecture("granite_swa", granite_swa, n_ff=0, n_shared=1, n_layer=5, window=16, fused=True),
)
