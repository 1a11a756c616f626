"""Arcee's models. Tensors and metadata: ``src/models/afmoe.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def afmoe(m: Recipe) -> None:
    """Trinity-Nano, Mini, Large: a window in three of four layers, gated attention, a dense lead, a shared expert.

    Sigmoid gating with a selection bias; norms before and after.
    """
    m.keys |= {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.826}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention(head_norms=True)
        layer.matrix("attn_gate", m.shape.n_embd, m.shape.n_head * m.shape.head_dim)
        layer.norm("post_attention_norm")
        layer.norm("ffn_norm")
        if layer.is_dense:
            layer.ffn()
        else:
            layer.router(selection_bias=True)
            layer.experts(fused=False)
            layer.shared()
        layer.norm("post_ffw_norm")
    m.output()


ARCHITECTURES = (architecture("afmoe", afmoe, n_dense=1, n_shared=1, window=16, tokenizer="afmoe"),)
