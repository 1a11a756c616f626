"""Poolside's models. Tensors and metadata: ``src/models/laguna.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def laguna(m: Recipe) -> None:
    """Laguna-XS.2, S.2.1, M.1: sigmoid gating with a selection bias, a shared expert, a dense lead, gated attention.

    Three layers of four have a window, and more heads than the others.
    """
    shape = m.shape
    heads = [shape.n_head * (2 if number % 4 else 1) for number in range(shape.n_layer)]
    m.keys |= {
        "attention.head_count": heads,
        "attention.sliding_window_pattern": [n % 4 != 0 for n in range(len(heads))],
    }
    m.keys |= {"rope.dimension_count": shape.head_dim // 2, "rope.dimension_count_swa": shape.head_dim}
    m.keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base_swa": 1e4}
    m.keys |= {"expert_shared_feed_forward_length": shape.n_ff_exp, "expert_gating_func": 2}
    m.keys |= {"expert_weights_norm": True, "expert_weights_scale": 2.5}
    m.embedding()
    for layer, count in zip(m.layers(), heads, strict=True):
        layer.norm("attn_norm")
        query, key = count * shape.head_dim, shape.n_head_kv * shape.head_dim
        for name, width in (("q", query), ("k", key), ("v", key), ("gate", count)):
            layer.matrix(f"attn_{name}", shape.n_embd, width)
        layer.matrix("attn_output", query, shape.n_embd)
        layer.norm("attn_q_norm", shape.head_dim)
        layer.norm("attn_k_norm", shape.head_dim)
        layer.norm("ffn_norm")
        if layer.is_dense:
            layer.ffn()
            continue
        layer.router(selection_bias=True)
        layer.experts()
        layer.shared()
    m.output()


ARCHITECTURES = (architecture("laguna", laguna, n_layer=5, n_dense=1, n_shared=1, window=16, rope_base=5e5),)
