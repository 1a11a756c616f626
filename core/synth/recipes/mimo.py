"""Xiaomi's models. Tensors and metadata: ``src/models/mimo2.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Layer, Recipe, architecture

_VALUE = 16


def mimo2(m: Recipe) -> None:
    """MiMo-V2-Flash, V2.5: values narrower than keys, sinks where there is a window, dense next-token prediction."""
    shape = m.shape
    windows = [n % 2 == 1 for n in range(shape.n_layer)] + [True] * shape.n_nextn
    m.keys |= {"attention.sliding_window_pattern": windows, "rope.freq_base_swa": 1e3}
    m.keys |= {"attention.head_count_kv": [shape.n_head_kv * (1 + window) for window in windows]}
    m.keys |= {"attention.value_length": _VALUE, "attention.value_scale": 0.707}
    m.keys |= {"rope.dimension_count": shape.head_dim // 2, "expert_gating_func": 2}
    m.output()
    m.embedding()
    for layer in m.layers():
        _attention(layer, windows[layer.number])
        if layer.is_dense:
            layer.ffn()
        else:
            layer.router(selection_bias=True)
            layer.experts()
    for layer in m.heads():
        _attention(layer, window=True)
        layer.ffn()
        layer.nextn()


def _attention(layer: Layer, window: bool) -> None:
    embd, head, heads, kv = layer.shape.n_embd, layer.shape.head_dim, layer.shape.n_head, layer.shape.n_head_kv
    layer.norm("attn_norm")
    layer.matrix("attn_qkv", embd, heads * head + kv * (1 + window) * (head + _VALUE))
    layer.matrix("attn_output", heads * _VALUE, embd)
    if window:
        layer.tensor("attn_sinks.weight", (heads,), "bias")
    layer.norm("ffn_norm")


ARCHITECTURES = (architecture("mimo2", mimo2, n_dense=1, n_nextn=3, window=16),)
