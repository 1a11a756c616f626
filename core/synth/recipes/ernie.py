"""Baidu's ERNIE. Tensors and metadata: ``src/models/ernie4-5*.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def ernie4_5_moe(m: Recipe) -> None:
    """ERNIE-4.5-21B-A3B, 300B-A47B: a dense lead, softmax gating with a selection bias; the smaller shares experts."""
    m.keys |= {"interleave_moe_layer_step": 1}
    m.keys |= {"expert_shared_feed_forward_length": m.shape.n_shared * m.shape.n_ff_exp}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention()
        layer.norm("ffn_norm")
        if layer.is_dense:
            layer.ffn()
            continue
        layer.router(selection_bias=True)
        layer.experts(fused=False)
        layer.shared()
    m.output()


ARCHITECTURES = (architecture("ernie4_5-moe", ernie4_5_moe, n_dense=1, n_shared=2, rope_base=5e5),)
