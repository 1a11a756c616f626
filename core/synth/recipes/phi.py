"""Microsoft's models. Tensors and metadata: ``src/models/phimoe.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def phimoe(m: Recipe) -> None:
    """Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE: biases of attention, norms and logits, positions scaled by LongRoPE."""
    m.keys |= {"rope.dimension_count": m.shape.head_dim, "rope.scaling.attn_factor": 1.19}
    m.keys |= {"rope.scaling.original_context_length": 256}
    m.embedding()
    for kind in ("long", "short"):
        m.norm(f"rope_factors_{kind}", m.shape.head_dim // 2)
    for layer in m.layers():
        layer.norm("attn_norm", bias=True)
        layer.attention(biases=("q", "k", "v", "output"))
        layer.norm("ffn_norm", bias=True)
        layer.router()
        layer.experts()
    m.output(bias=True, norm_bias=True)


ARCHITECTURES = (architecture("phimoe", phimoe, head_dim=16, n_ff=0),)
