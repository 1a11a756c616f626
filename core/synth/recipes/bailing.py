"""InclusionAI's models. Tensors and metadata: ``src/models/bailingmoe*.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Layer, Recipe, architecture


def bailingmoe(m: Recipe) -> None:
    """Ling-lite, Ling-plus, Ring-lite: shared experts."""
    m.keys |= {"rope.dimension_count": m.shape.head_dim, "expert_weights_norm": True, "expert_weights_scale": 1.0}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention()
        layer.norm("ffn_norm")
        layer.router()
        layer.experts()
        layer.shared()
    m.output()


def bailingmoe2(m: Recipe) -> None:
    """Ling 2.0, Ring 2.0: groups of experts with a selection bias, shared ones, a dense lead, next-token prediction."""
    m.keys |= {"rope.dimension_count": m.shape.head_dim // 2, "expert_shared_feed_forward_length": m.shape.n_ff_exp}
    m.keys |= {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
    m.keys |= {"expert_group_count": 4, "expert_group_used_count": 2}
    m.output()
    m.embedding()
    for layer in m.layers():
        _bailingmoe2(layer)
    for layer in m.heads():
        _bailingmoe2(layer)
        layer.nextn()
        layer.norm("layer_output_norm")


def _bailingmoe2(layer: Layer) -> None:
    shape = layer.shape
    layer.norm("attn_norm")
    layer.matrix("attn_qkv", shape.n_embd, (shape.n_head + 2 * shape.n_head_kv) * shape.head_dim)
    layer.matrix("attn_output", shape.n_head * shape.head_dim, shape.n_embd)
    layer.norm("attn_q_norm", shape.head_dim)
    layer.norm("attn_k_norm", shape.head_dim)
    layer.norm("ffn_norm")
    if layer.is_dense:
        layer.ffn()
        return
    layer.router(selection_bias=True)
    layer.experts()
    layer.shared()


ARCHITECTURES = (
    architecture("bailingmoe", bailingmoe, n_ff=0, n_shared=2),
    architecture("bailingmoe2", bailingmoe2, head_dim=16, n_expert=16, n_used=4, n_dense=1, n_shared=1, n_nextn=1),
)
