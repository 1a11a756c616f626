"""Deepgrove's models. Tensors and metadata: ``src/models/maple.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def maple(m: Recipe) -> None:
    """Maple-preview: positions only where there is a window, clamped experts."""
    m.keys |= {"attention.sliding_window_pattern": [n % 2 == 0 for n in range(m.shape.n_layer)]}
    m.keys |= {"rope.dimension_count": m.shape.head_dim, "swiglu_clamp_exp": [7.0] * m.shape.n_layer}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention(head_norms=True)
        layer.norm("ffn_norm")
        layer.router()
        layer.experts()
    m.output()


ARCHITECTURES = (architecture("maple", maple, n_ff=0, window=16),)
