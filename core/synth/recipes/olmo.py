"""Ai2's models. Tensors and metadata: ``src/models/olmoe.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def olmoe(m: Recipe) -> None:
    """OLMoE-1B-7B: norms over the whole of query and key, weights of experts that do not add up to one."""
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention()
        layer.norm("attn_q_norm")
        layer.norm("attn_k_norm")
        layer.norm("ffn_norm")
        layer.router()
        layer.experts()
    m.output()


ARCHITECTURES = (architecture("olmoe", olmoe, head_dim=16, n_head_kv=4, n_expert=16, n_used=4, n_ff=0),)
