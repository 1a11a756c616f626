"""Databricks' models. Tensors and metadata: ``src/models/dbrx.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def dbrx(m: Recipe) -> None:
    """DBRX: query, key and value in one tensor and clamped, layer norms without a bias."""
    m.keys |= {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 8.0}
    embd, key = m.shape.n_embd, m.shape.n_head_kv * m.shape.head_dim
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.matrix("attn_qkv", embd, embd + 2 * key)
        layer.matrix("attn_output", embd, embd)
        layer.norm("attn_output_norm")
        layer.router()
        layer.experts()
    m.output()


ARCHITECTURES = (architecture("dbrx", dbrx, head_dim=16, n_expert=16, n_used=4, n_ff=0),)
