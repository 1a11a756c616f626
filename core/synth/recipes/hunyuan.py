"""Tencent's models. Tensors and metadata: ``src/models/hunyuan-moe.cpp`` and ``hy-v*.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Layer, Recipe, architecture


def hunyuan_moe(m: Recipe) -> None:
    """Hunyuan-A13B: a shared expert; the metadata give the width of all experts as that of a dense layer."""
    m.keys |= {"expert_shared_feed_forward_length": m.shape.n_ff_exp}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention(head_norms=True)
        layer.norm("ffn_norm")
        layer.router()
        layer.experts()
        layer.shared()
    m.output()


def hy_v3(m: Recipe) -> None:
    """Hy3: a dense lead, a shared expert, sigmoid gating with a selection bias, next-token prediction."""
    m.keys |= {"expert_shared_feed_forward_length": m.shape.n_ff_exp}
    m.keys |= {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
    m.output()
    m.embedding()
    for layer in m.layers():
        _hy_v3(layer)
    for layer in m.heads():
        _hy_v3(layer)
        layer.nextn()


def _hy_v3(layer: Layer) -> None:
    layer.norm("attn_norm")
    layer.attention(head_norms=True)
    layer.norm("ffn_norm")
    if layer.is_dense:
        layer.ffn()
        return
    layer.router()
    layer.tensor("exp_probs_b", (layer.shape.n_expert,), "bias")
    layer.experts()
    layer.shared()


def hy_v4(m: Recipe) -> None:
    """Hy4: as Hy3, with residuals side by side, latent attention to a choice of tokens, and limits in the experts.

    A layer without an indexer attends to what the one before it chose.
    """
    streams, rope, rank = 4, 8, 32
    owns_indexer = [layer.number % 2 == 0 for layer in m.layers()]
    m.keys |= {"attention.head_count_kv": 1, "attention.key_length": rank + rope, "attention.value_length": rank}
    m.keys |= {"attention.key_length_mla": m.shape.head_dim, "attention.value_length_mla": m.shape.head_dim}
    m.keys |= {"attention.q_lora_rank": 48, "attention.kv_lora_rank": rank, "rope.dimension_count": rope}
    m.keys |= {"attention.indexer.head_count": 2, "attention.indexer.key_length": 16, "attention.indexer.top_k": 12}
    m.keys |= {"attention.indexer.types": owns_indexer, "swiglu_clamp_exp": [7.0] * m.shape.n_layer}
    m.keys |= {"hyper_connection.count": streams, "hyper_connection.epsilon": 1e-6, "hyper_connection.magnitude": 2.0}
    m.keys |= {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
    m.embedding()
    for layer in m.layers():
        _streams(layer, "hc_attn", streams, 2)
        layer.norm("attn_norm")
        _latent_attention(layer, rope, 48, rank)
        if owns_indexer[layer.number]:
            layer.matrix("indexer.attn_q_b", 48, 2 * 16)
            layer.matrix("indexer.attn_k", m.shape.n_embd, 16)
            layer.norm("indexer.k_norm", 16, bias=True)
            layer.matrix("indexer.proj", m.shape.n_embd, 2)
        _streams(layer, "hc_ffn", streams, 2)
        layer.norm("ffn_norm")
        if layer.is_dense:
            layer.ffn()
            continue
        layer.router(selection_bias=True)
        layer.experts(fused=False)
        layer.shared()
    _streams(m, "output_hc", streams, 1)
    m.output()


def _latent_attention(layer: Layer, rope: int, q_rank: int, rank: int) -> None:
    """Attention of low rank with sinks and a gate for its output."""
    embd, head, heads = layer.shape.n_embd, layer.shape.head_dim, layer.shape.n_head
    layer.tensor("attn_sinks.weight", (heads,), "bias")
    layer.matrix("attn_q_a", embd, q_rank)
    layer.norm("attn_q_a_norm", q_rank)
    layer.matrix("attn_q_b", q_rank, heads * head)
    layer.matrix("attn_kv_a_mqa", embd, rank + rope)
    layer.norm("attn_kv_a_norm", rank)
    layer.tensor("attn_k_b.weight", (head - rope, rank, heads))
    layer.tensor("attn_v_b.weight", (rank, head, heads))
    layer.matrix("attn_output", heads * head, embd)
    layer.matrix("attn_gate", embd, heads * head)


def _streams(m: Recipe | Layer, name: str, streams: int, parts: int) -> None:
    """What takes one residual from those that lie side by side and, with two parts, adds to them."""
    m.matrix(f"{name}_fn", streams * m.shape.n_embd, parts * streams, quant="F32")
    m.tensor(f"{name}_base.weight", (parts * streams,), "bias")
    m.norm(f"{name}_scale", parts)


ARCHITECTURES = (
    architecture("hunyuan-moe", hunyuan_moe, n_ff=0, n_shared=1, tokenizer="hunyuan"),
    architecture("hy_v3", hy_v3, n_dense=1, n_shared=1, n_nextn=1),
    architecture("hy_v4", hy_v4, n_dense=1, n_shared=1),
)
