"""StepFun's models. Tensors and metadata: ``src/models/step35.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Layer, Recipe, architecture


def step35(m: Recipe) -> None:
    """Step-3.5-Flash: more heads where there is a window, a gate per head, clamped experts, dense next-token heads."""
    shape = m.shape
    windows = [n % 2 == 1 for n in range(shape.n_block)]
    m.keys |= {"attention.sliding_window_pattern": windows, "rope.freq_base_swa": 1e3}
    m.keys |= {"attention.head_count": [shape.n_head * (1 + window) for window in windows]}
    m.keys |= {"attention.head_count_kv": [shape.n_head_kv] * shape.n_block}
    m.keys |= {"rope.dimension_count": shape.head_dim, "expert_shared_feed_forward_length": shape.n_ff_exp}
    m.keys |= {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 3.0}
    m.keys |= {"swiglu_clamp_exp": [1.0] * shape.n_block, "swiglu_clamp_shexp": [1.0] * shape.n_block}
    m.output()
    m.embedding()
    m.norm("rope_freqs", shape.head_dim // 2)
    for layer in m.layers():
        _attention(layer, windows[layer.number])
        if layer.is_dense:
            layer.ffn()
        else:
            layer.router(selection_bias=True)
            layer.experts()
            layer.shared()
    for layer in m.heads():
        _attention(layer, windows[layer.number])
        layer.ffn()
        layer.nextn()


def _attention(layer: Layer, window: bool) -> None:
    embd, head, heads, kv = layer.shape.n_embd, layer.shape.head_dim, layer.shape.n_head, layer.shape.n_head_kv
    heads *= 1 + window
    layer.norm("attn_norm")
    for name, n_in, n_out in (("q", embd, heads), ("k", embd, kv), ("v", embd, kv)):
        layer.matrix(f"attn_{name}", n_in, n_out * head)
    layer.matrix("attn_gate", embd, heads)
    layer.matrix("attn_output", heads * head, embd)
    layer.norm("attn_q_norm", head)
    layer.norm("attn_k_norm", head)
    layer.norm("ffn_norm")


ARCHITECTURES = (architecture("step35", step35, n_dense=1, n_shared=1, n_nextn=3, window=16),)
