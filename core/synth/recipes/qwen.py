"""Qwen's models. Tensors and metadata: ``src/models/qwen*.cpp`` of llama.cpp."""

from __future__ import annotations

from array import array

from bmoe.synth.recipe import Layer, Recipe, architecture


def qwen2moe(m: Recipe) -> None:
    """Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B: attention with biases, a shared expert behind a gate."""
    m.keys |= {"expert_shared_feed_forward_length": m.shape.n_ff}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention(biases=("q", "k", "v"))
        layer.norm("ffn_norm")
        _gated_experts(layer)
    m.output()


def qwen3moe(m: Recipe) -> None:
    """Qwen3-30B-A3B, 235B-A22B."""
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention(head_norms=True)
        layer.norm("ffn_norm")
        layer.router()
        layer.experts()
    m.output()


def qwen3vlmoe(m: Recipe) -> None:
    """Qwen3-VL-30B-A3B, 235B-A22B: positions of three axes; an image would enter the first layers, too."""
    m.keys |= {"rope.dimension_sections": (6, 5, 5, 0), "n_deepstack_layers": 3}
    qwen3moe(m)


def qwen3next(m: Recipe) -> None:
    """Qwen3-Next-80B-A3B: three of four layers are recurrent; a gated shared expert, next-token prediction."""
    _hybrid(m)
    m.output()
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        if _is_recurrent(layer):
            _delta_net(layer)
            layer.matrix("ssm_ba", m.shape.n_embd, 2 * _N_VALUE)
        else:
            _gated_attention(layer)
        layer.norm("post_attention_norm")
        _gated_experts(layer)
    _heads(m)


def qwen35moe(m: Recipe) -> None:
    """Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B: as Qwen3-Next, with positions of three axes."""
    _hybrid(m)
    m.keys |= {"rope.dimension_sections": (2, 1, 1, 0)}
    m.output()
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        _mixer(layer)
        layer.norm("post_attention_norm")
        _gated_experts(layer)
    _heads(m)


def qwen4exp(m: Recipe) -> None:
    """Qwen3.8-Flash-Next: as Qwen3.5, with residuals side by side in place of norms.

    Attention sees blocks of tokens that an indexer chooses; one layer adds embeddings of hashed n-grams.
    """
    streams, low_rank, n_rows = 4, 16, (61, 67, 71, 73)
    each = m.shape.n_embd // len(n_rows)
    _hybrid(m)
    m.keys |= {"rope.dimension_sections": (2, 1, 1, 0)}
    m.keys |= {"hyper_connection.count": streams, "hyper_connection.low_rank": low_rank}
    m.keys |= {"attention.indexer.head_count": 2, "attention.indexer.key_length": 16, "attention.indexer.top_k": 12}
    m.keys |= {"attention.compress_ratios": [0 if _is_recurrent(layer) else 4 for layer in m.layers()]}
    m.keys |= {"ple.layers": [1], "ple.ngram_size": 3, "ple.heads_per_ngram": 2, "ple.conv_kernel": 4}
    m.keys |= {"ple.eos_token_id": 257, "embedding_length_per_layer_input": each}
    m.keys |= {"ple.layer_multipliers": array("Q", (9_176_546_803_157, 7_310_054_328_781, 23_916_054_330_117))}
    m.keys |= {"ple.head_offsets": array("Q", (sum(n_rows[:i]) for i in range(len(n_rows))))}
    m.keys |= {"ple.head_vocab_sizes": array("Q", n_rows)}
    m.embedding()
    m.tensor("per_layer_token_embd.weight", (each, sum(n_rows)), "embedding", m.shape.embedding)
    for layer in m.layers():
        _streams(layer, "hc_attn", streams, low_rank)
        layer.matrix("hc_attn_inject", streams * m.shape.n_embd, streams)
        _mixer(layer)
        if not _is_recurrent(layer):
            layer.matrix("indexer.q_proj", m.shape.n_embd, 2 * 16)
            layer.matrix("indexer.k_proj", m.shape.n_embd, 16)
            layer.norm("indexer.q_norm", 16)
            layer.norm("indexer.k_norm", 16)
        if layer.number == 1:
            layer.matrix("ple_key", m.shape.n_embd, streams * m.shape.n_embd)
            layer.matrix("ple_value", m.shape.n_embd, m.shape.n_embd)
            for name in ("key", "query", "conv"):
                layer.norm(f"ple_norm_{name}", streams * m.shape.n_embd)
            layer.tensor("ple_conv1d.weight", (4, streams * m.shape.n_embd), quant="F32")
        _streams(layer, "hc_ffn", streams, low_rank)
        layer.matrix("hc_ffn_inject", streams * m.shape.n_embd, streams)
        _gated_experts(layer)
    _streams(m, "output_hc", streams, low_rank)
    m.tensor("output.weight", (m.shape.n_embd, m.shape.n_vocab), "output", m.shape.output)


_STATE, _N_KEY, _N_VALUE = 16, 2, 4
"""Width of a head of a recurrent layer, and how many heads it has."""


def _hybrid(m: Recipe) -> None:
    m.keys |= {"expert_shared_feed_forward_length": m.shape.n_ff, "rope.dimension_count": m.shape.head_dim // 4}
    m.keys |= {"ssm.conv_kernel": 4, "ssm.state_size": _STATE, "ssm.group_count": _N_KEY}
    m.keys |= {"ssm.time_step_rank": _N_VALUE, "ssm.inner_size": _N_VALUE * _STATE, "full_attention_interval": 4}


def _is_recurrent(layer: Layer) -> bool:
    return (layer.number + 1) % 4 != 0


def _mixer(layer: Layer) -> None:
    if not _is_recurrent(layer):
        _gated_attention(layer)
        return
    _delta_net(layer)
    layer.matrix("ssm_beta", layer.shape.n_embd, _N_VALUE)
    layer.matrix("ssm_alpha", layer.shape.n_embd, _N_VALUE)


def _delta_net(layer: Layer) -> None:
    """A recurrent layer, but for what decides how much it keeps of the past."""
    embd, key, value = layer.shape.n_embd, _N_KEY * _STATE, _N_VALUE * _STATE
    layer.matrix("attn_qkv", embd, 2 * key + value)
    layer.matrix("attn_gate", embd, value)
    layer.tensor("ssm_conv1d.weight", (4, 2 * key + value), quant="F32")
    layer.bias("ssm_dt", _N_VALUE)
    layer.tensor("ssm_a", (_N_VALUE,), "decay")
    layer.norm("ssm_norm", _STATE)
    layer.matrix("ssm_out", value, embd)


def _gated_attention(layer: Layer) -> None:
    """Attention whose queries come with a gate for its output."""
    embd, head = layer.shape.n_embd, layer.shape.head_dim
    layer.matrix("attn_q", embd, 2 * head * layer.shape.n_head)
    layer.matrix("attn_k", embd, head * layer.shape.n_head_kv)
    layer.matrix("attn_v", embd, head * layer.shape.n_head_kv)
    layer.matrix("attn_output", head * layer.shape.n_head, embd)
    layer.norm("attn_q_norm", head)
    layer.norm("attn_k_norm", head)


def _gated_experts(layer: Layer) -> None:
    layer.router()
    layer.experts()
    layer.shared(layer.shape.n_ff, router=True)


def _heads(m: Recipe) -> None:
    for layer in m.heads():
        layer.norm("attn_norm")
        _gated_attention(layer)
        layer.norm("post_attention_norm")
        _gated_experts(layer)
        layer.nextn()


def _streams(m: Recipe | Layer, name: str, streams: int, low_rank: int) -> None:
    """What makes one residual of those that lie side by side."""
    width = streams * m.shape.n_embd
    m.norm(f"{name}_norm", width)
    m.matrix(f"{name}_down", width, low_rank)
    m.matrix(f"{name}_up", low_rank, width)


ARCHITECTURES = (
    architecture("qwen2moe", qwen2moe, head_dim=16, rope_base=1e6, tokenizer="qwen2"),
    architecture(
        "qwen3moe", qwen3moe, n_embd=256, n_ff_exp=256, n_ctx=2048, n_ff=0, quant="Q4_K", rope_base=1e6,
        tokenizer="qwen2",
    ),
    architecture("qwen3vlmoe", qwen3vlmoe, n_ff=0, rope_base=5e6, tokenizer="qwen2"),
    architecture("qwen3next", qwen3next, n_nextn=1, rope_base=1e7, tokenizer="qwen2"),
    architecture("qwen35moe", qwen35moe, n_nextn=1, rope_base=1e7, tokenizer="qwen35"),
    architecture("qwen4exp", qwen4exp, rope_base=1e7, tokenizer="qwen35"),
)  # fmt: skip
