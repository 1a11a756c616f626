"""Snowflake's models. Tensors and metadata: ``src/models/arctic.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def arctic(m: Recipe) -> None:
    """Snowflake Arctic: the experts get the layer's input, beside attention and a dense feed-forward."""
    m.keys |= {"rope.dimension_count": m.shape.head_dim}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention()
        layer.norm("ffn_norm")
        layer.ffn(m.shape.n_embd)
        layer.norm("ffn_norm_exps")
        layer.router()
        layer.experts()
    m.output()


ARCHITECTURES = (architecture("arctic", arctic, head_dim=16, n_ff=0),)
