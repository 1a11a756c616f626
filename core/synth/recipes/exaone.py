"""LG's EXAONE. Tensors and metadata: ``src/models/exaone-moe.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def exaone_moe(m: Recipe) -> None:
    """K-EXAONE-236B-A23B: a window in three of four layers, a dense lead, a shared expert, next-token prediction.

    Sigmoid gating with a selection bias; the head for next-token prediction has no experts.
    """
    m.keys |= {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
    m.keys |= {"expert_shared_feed_forward_length": m.shape.n_ff_exp, "rope.scaling.type": "none"}
    m.keys |= {"attention.sliding_window_pattern": [(layer.number + 1) % 4 != 0 for layer in m.layers()]}
    m.output()
    m.embedding()
    for layer in (*m.layers(), *m.heads()):
        layer.norm("attn_norm")
        layer.attention(head_norms=True)
        layer.norm("ffn_norm")
        if layer.number >= m.shape.n_layer:
            layer.ffn()
            layer.nextn()
        elif layer.is_dense:
            layer.ffn()
        else:
            layer.router(selection_bias=True)
            layer.experts(fused=False)
            layer.shared()


ARCHITECTURES = (
    architecture(
        "exaone-moe", exaone_moe, n_dense=1, n_shared=1, n_nextn=1, window=16, rope_base=1e6, tokenizer="exaone-moe"
    ),
)
