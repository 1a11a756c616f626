"""rednote's dots. Tensors and metadata: ``src/models/dots1.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def dots1(m: Recipe) -> None:
    """dots.llm1: a dense lead, shared experts, sigmoid gating with a selection bias; no heads are shared."""
    m.keys |= {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention(head_norms=True)
        layer.norm("ffn_norm")
        if layer.is_dense:
            layer.ffn()
            continue
        layer.router(selection_bias=True)
        layer.experts(fused=False)
        layer.shared()
    m.output()


ARCHITECTURES = (architecture("dots1", dots1, n_head_kv=4, n_dense=1, n_shared=2, rope_base=1e7, tokenizer="qwen2"),)
