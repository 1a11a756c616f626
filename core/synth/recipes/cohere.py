"""Cohere's models. Tensors and metadata: ``src/models/cohere2moe.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Layer, Recipe, architecture


def cohere2moe(m: Recipe) -> None:
    """North-Mini-Code: experts beside attention, averaged with the shared ones; a dense lead, next-token prediction."""
    m.keys |= {"attention.sliding_window_pattern": [n % 2 == 1 for n in range(m.shape.n_block)]}
    m.keys |= {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.25, "rope.dimension_count": m.shape.head_dim}
    m.keys |= {"expert_gating_func": 2, "expert_weights_norm": True}
    m.keys |= {"expert_shared_feed_forward_length": m.shape.n_ff_exp * m.shape.n_shared}
    del m.keys["attention.layer_norm_rms_epsilon"]  # the norms subtract the mean
    m.output()
    m.embedding()
    for layer in m.layers():
        _block(layer)
    for layer in m.heads():
        _block(layer)
        layer.nextn()


def _block(layer: Layer) -> None:
    layer.norm("attn_norm")
    layer.attention()
    if layer.is_dense:
        layer.ffn()
        return
    layer.router()
    layer.experts()
    layer.shared()


ARCHITECTURES = (architecture("cohere2moe", cohere2moe, n_dense=1, n_shared=2, n_nextn=1, window=16),)
