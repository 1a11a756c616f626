"""Google's models. Tensors and metadata: ``src/models/gemma4.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Layer, Recipe, architecture


def gemma4(m: Recipe) -> None:
    """Gemma 4 26B-A4B: a dense feed-forward beside the experts, which have gate and up in one tensor and a scale each.

    Layers without a window have longer heads, fewer of them for keys, and these serve as values too.
    """
    shape = m.shape
    windows = [n % 2 == 0 for n in range(shape.n_layer)]
    m.keys |= {"attention.sliding_window_pattern": windows, "rope.freq_base_swa": 1e3}
    m.keys |= {"attention.head_count_kv": [shape.n_head_kv if window else 1 for window in windows]}
    m.keys |= {f"attention.{side}_length_swa": shape.head_dim // 2 for side in ("key", "value")}
    m.keys |= {"rope.dimension_count": shape.head_dim, "rope.dimension_count_swa": shape.head_dim // 2}
    m.keys |= {"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0}
    m.keys |= {"final_logit_softcapping": 30.0}
    m.embedding()
    m.norm("rope_freqs", shape.head_dim // 2)
    for layer in m.layers():
        layer.norm("attn_norm")
        _attention(layer, windows[layer.number])
        layer.norm("post_attention_norm")
        layer.norm("layer_output_scale", 1)
        layer.norm("ffn_norm")
        layer.ffn()
        layer.norm("post_ffw_norm_1")
        layer.norm("pre_ffw_norm_2")
        layer.router()
        layer.tensor("ffn_gate_inp.scale", (shape.n_embd,), "norm")
        layer.experts()
        layer.tensor("ffn_down_exps.scale", (shape.n_expert,), "norm")
        layer.norm("post_ffw_norm_2")
        layer.norm("post_ffw_norm")
    m.output()


def _attention(layer: Layer, window: bool) -> None:
    shape = layer.shape
    if window:
        layer.attention(head_norms=True, head_dim=shape.head_dim // 2)
        return
    layer.matrix("attn_q", shape.n_embd, shape.n_head * shape.head_dim)
    layer.matrix("attn_k", shape.n_embd, shape.head_dim)
    layer.matrix("attn_output", shape.n_head * shape.head_dim, shape.n_embd)
    layer.norm("attn_q_norm", shape.head_dim)
    layer.norm("attn_k_norm", shape.head_dim)


ARCHITECTURES = (architecture("gemma4", gemma4, window=16, fused=True),)
