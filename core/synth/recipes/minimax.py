"""MiniMax' models. Tensors and metadata: ``src/models/minimax-*.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def minimax_01(m: Recipe) -> None:
    """MiniMax-Text-01, MiniMax-M1: linear attention with a state in all layers but every eighth (here the second)."""
    embd, query = m.shape.n_embd, m.shape.n_head * m.shape.head_dim
    m.keys |= {"full_attention_interval": 2, "residual_scale": 3.5, "rope.dimension_count": m.shape.head_dim // 2}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        if layer.number % 2:
            layer.attention()
        else:
            layer.matrix("attn_qkv", embd, 3 * query)
            layer.norm("attn_norm_2", query)
            layer.matrix("attn_gate", embd, query)
            layer.matrix("attn_output", query, embd)
        layer.norm("ffn_norm")
        layer.router()
        layer.experts()
    m.output()


def minimax_m2(m: Recipe) -> None:
    """MiniMax-M2, M2.1, M2.5: norms over all heads at once, sigmoid gating with a selection bias."""
    m.keys |= {"rope.dimension_count": m.shape.head_dim // 2, "expert_gating_func": 2}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention()
        layer.norm("attn_q_norm", m.shape.n_head * m.shape.head_dim)
        layer.norm("attn_k_norm", m.shape.n_head_kv * m.shape.head_dim)
        layer.norm("ffn_norm")
        layer.router(selection_bias=True)
        layer.experts()
    m.output()


def minimax_m3(m: Recipe) -> None:
    """MiniMax-M3: a dense lead, shared experts, and an index by which attention chooses blocks of positions."""
    shape, index = m.shape, 32
    m.keys |= {"rope.dimension_count": shape.head_dim // 2, "expert_gating_func": 2}
    m.keys |= {"expert_weights_norm": True, "expert_weights_scale": 2.0}
    m.keys |= {"attention.indexer.head_count": shape.n_head_kv, "attention.indexer.key_length": index}
    m.keys |= {"attention.indexer.block_size": 8, "attention.indexer.top_k": 2, "attention.indexer.local_blocks": 1}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention(head_norms=True)
        layer.norm("ffn_norm")
        if layer.is_dense:
            layer.ffn()
            continue
        layer.matrix("indexer.q_proj", shape.n_embd, shape.n_head_kv * index, quant="F32")
        layer.matrix("indexer.k_proj", shape.n_embd, index, quant="F32")
        layer.norm("indexer.q_norm", index)
        layer.norm("indexer.k_norm", index)
        layer.router(selection_bias=True)
        layer.experts()
        layer.shared()
    m.output()


ARCHITECTURES = (
    architecture("minimax-01", minimax_01, n_ff=0),
    architecture("minimax-m2", minimax_m2, n_ff=0),
    architecture("minimax-m3", minimax_m3, n_dense=1, n_shared=1),
)
