"""DeepSeek's models. Tensors and metadata: ``src/models/deepseek*.cpp`` of llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence

from bmoe.synth import latent
from bmoe.synth.latent import INDEX_DIM, INDEX_HEADS, RANK_QUERY, STREAMS, Latent
from bmoe.synth.recipe import Layer, Recipe, TensorPlan, architecture


def deepseek(m: Recipe) -> None:
    """DeepSeekMoE-16B, DeepSeek-OCR: a dense lead, shared experts, attention as in Llama."""
    m.keys |= {"rope.dimension_count": m.shape.head_dim, "expert_weights_scale": 1.0}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention()
        latent.feed_forward(layer, selection_bias=False)
    m.output()


def deepseek2(m: Recipe) -> None:
    """DeepSeek-V2, V3, R1, Kimi-K2, GLM-4.7-Flash: latent attention, sigmoid gating with a bias, groups of experts."""
    m.keys |= Latent().keys() | latent.sigmoid_keys()
    m.keys |= {"expert_group_count": 4, "expert_group_used_count": 2}
    m.output()
    m.embedding()
    for layer in m.layers():
        _latent(layer)
    for layer in m.heads():
        _latent(layer)
        layer.nextn()


def deepseek32(m: Recipe) -> None:
    """DeepSeek-V3.2: as V3, but attention sees the tokens that an indexer chooses."""
    m.keys |= Latent().keys() | latent.indexer_keys() | latent.sigmoid_keys()
    m.keys |= {"expert_group_count": 4, "expert_group_used_count": 2}
    m.output()
    m.embedding()
    for layer in m.layers():
        _latent(layer)
        latent.indexer(layer)
    for layer in m.heads():
        _latent(layer)
        latent.indexer(layer)
        layer.nextn()


def _latent(layer: Layer) -> None:
    layer.norm("attn_norm")
    Latent().attention(layer)
    latent.feed_forward(layer)


_N_HASHED = 2
_RATIOS = 0, 4, 128, 4
_RANK_OUTPUT = 16


def deepseek4(m: Recipe) -> None:
    """DeepSeek-V4: a token's id gives the experts of the first layers; a compressed history; four residual streams."""
    _deepseek4_keys(m, _RATIOS)
    m.keys |= latent.indexer_keys(top_k=4)
    m.keys |= {"attention.compress_rope_freq_base": 160000.0, "hash_layer_count": _N_HASHED}
    m.embedding()
    for layer in m.layers():
        _deepseek4(layer, _RATIOS[layer.number], hashed=layer.number < _N_HASHED)
        if layer.number < _N_HASHED:
            table = f"blk.{layer.number}.ffn_gate_tid2eid.weight"
            m.plans.append(TensorPlan(table, (m.shape.n_used, m.shape.n_vocab), "I32", "ids", m.shape.n_expert))
    _join_streams(m)
    m.output()


def dflash(m: Recipe) -> None:
    """DSpark, which drafts for DeepSeek-V4: layers like the model's, fed from some of these; it has no embeddings."""
    targets, rank = (1, 2, 3), 16
    _deepseek4_keys(m, (0,) * m.shape.n_layer)
    m.keys |= {"target_layers": targets, "block_size": 4}
    m.matrix("fc", len(targets) * m.shape.n_embd, m.shape.n_embd)
    m.norm("enc.output_norm")
    for layer in m.layers():
        _deepseek4(layer, 0, hashed=False)
    _join_streams(m)
    m.norm("output_norm")
    for name in ("markov_w1", "markov_w2"):
        m.matrix(name, rank, m.shape.n_vocab)


def _deepseek4_keys(m: Recipe, ratios: Sequence[int]) -> None:
    m.keys |= latent.stream_keys()
    m.keys |= {"attention.head_count_kv": 1, "rope.dimension_count": 16, "attention.q_lora_rank": RANK_QUERY}
    m.keys |= {"attention.output_group_count": 2, "attention.output_lora_rank": _RANK_OUTPUT}
    m.keys |= {"attention.compress_ratios": ratios, "swiglu_clamp_exp": [10.0] * m.shape.n_layer}
    m.keys |= {"expert_gating_func": 4, "expert_weights_norm": True, "expert_weights_scale": 1.5}


def _deepseek4(layer: Layer, ratio: int, *, hashed: bool) -> None:
    layer.norm("attn_norm")
    latent.streams(layer)
    _compressed_attention(layer, ratio)
    latent.feed_forward(layer, selection_bias=not hashed)


def _join_streams(m: Recipe) -> None:
    m.tensor("output_hc_fn.weight", (STREAMS * m.shape.n_embd, STREAMS), quant="F32")
    m.tensor("output_hc_base.weight", (STREAMS,), "bias")
    m.tensor("output_hc_scale.weight", (1,), "norm")


def _compressed_attention(layer: Layer, ratio: int) -> None:
    """To a window of tokens and, with a ``ratio``, to one key for so many tokens before it."""
    embd, width, n_head = layer.shape.n_embd, layer.shape.head_dim, layer.shape.n_head
    layer.matrix("attn_q_a", embd, RANK_QUERY)
    layer.norm("attn_q_a_norm", RANK_QUERY)
    layer.matrix("attn_q_b", RANK_QUERY, n_head * width)
    layer.matrix("attn_kv", embd, width)
    layer.norm("attn_kv_a_norm", width)
    layer.tensor("attn_sinks.weight", (n_head,), "bias")
    layer.matrix("attn_output_a", n_head * width // 2, 2 * _RANK_OUTPUT)
    layer.matrix("attn_output_b", 2 * _RANK_OUTPUT, embd)
    if ratio:
        _compressor(layer, "attn", ratio, width)
    if ratio == 4:
        layer.matrix("indexer.attn_q_b", RANK_QUERY, INDEX_HEADS * INDEX_DIM)
        layer.matrix("indexer.proj", embd, INDEX_HEADS)
        _compressor(layer, "indexer", ratio, INDEX_DIM)


def _compressor(layer: Layer, part: str, ratio: int, width: int) -> None:
    wide = 2 * width if ratio == 4 else width  # of blocks that overlap
    layer.matrix(f"{part}_compressor_kv", layer.shape.n_embd, wide)
    layer.matrix(f"{part}_compressor_gate", layer.shape.n_embd, wide)
    layer.tensor(f"{part}_compressor_ape.weight", (wide, ratio), "bias")
    layer.norm(f"{part}_compressor_norm", width)


ARCHITECTURES = (
    architecture("deepseek", deepseek, n_head_kv=4, head_dim=16, n_dense=1, n_shared=2),
    architecture("deepseek2-ocr", deepseek, n_head_kv=4, head_dim=16, n_dense=1, n_shared=2),
    architecture("deepseek2", deepseek2, n_dense=1, n_shared=1, n_nextn=1),
    architecture("deepseek32", deepseek32, n_dense=1, n_shared=1, n_nextn=1),
    architecture("deepseek4", deepseek4, head_dim=64, n_shared=1, window=16),
    architecture("dflash", dflash, n_layer=2, head_dim=64, n_shared=1, window=16),
)
