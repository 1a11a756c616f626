"""What models that descend from DeepSeek's share: latent attention, indexers, delta attention, parallel streams."""

from __future__ import annotations

from dataclasses import dataclass

from bmoe.synth.recipe import Key, Layer

RANK_QUERY = 24
INDEX_HEADS, INDEX_DIM = 2, 64  # keys are rotated in blocks of 64
STREAMS = 4
_CONV, _DELTA_DIM = 4, 16


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention to one vector of ``rank`` per token, beside which ``rope`` elements hold the position.

    The key of a head is ``nope`` elements from that vector and the rotated ones, its value ``value`` elements.
    """

    rank: int = 32
    rope: int = 16
    nope: int = 16
    value: int = 24

    def keys(self, end: str = "") -> dict[str, Key]:
        """The metadata; to the cache it is one head, whose key and value are the vector."""
        return {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": RANK_QUERY,
            "rope.dimension_count": self.rope,
            f"attention.kv_lora_rank{end}": self.rank,
            f"attention.key_length{end}": self.rank + self.rope,
            f"attention.value_length{end}": self.rank,
            f"attention.key_length_mla{end}": self.nope + self.rope,
            f"attention.value_length_mla{end}": self.value,
        }

    def attention(self, layer: Layer, *, plain_query: bool = False, n_head: int = 0) -> None:
        """Add the tensors; a ``plain_query`` has no vector of lower rank before it."""
        embd, n_head = layer.shape.n_embd, n_head or layer.shape.n_head
        if plain_query:
            layer.matrix("attn_q", embd, n_head * (self.nope + self.rope))
        else:
            layer.matrix("attn_q_a", embd, RANK_QUERY)
            layer.norm("attn_q_a_norm", RANK_QUERY)
            layer.matrix("attn_q_b", RANK_QUERY, n_head * (self.nope + self.rope))
        layer.matrix("attn_kv_a_mqa", embd, self.rank + self.rope)
        layer.norm("attn_kv_a_norm", self.rank)
        layer.tensor("attn_k_b.weight", (self.nope, self.rank, n_head))
        layer.tensor("attn_v_b.weight", (self.rank, self.value, n_head))
        layer.matrix("attn_output", n_head * self.value, embd)


def feed_forward(layer: Layer, *, selection_bias: bool = True) -> None:
    """Add the norm and a dense feed-forward or, after the lead, routed experts and shared ones."""
    layer.norm("ffn_norm")
    if layer.is_dense:
        layer.ffn()
        return
    layer.router(selection_bias=selection_bias)
    layer.experts()
    layer.shared()


def sigmoid_keys() -> dict[str, Key]:
    """The metadata of routing by sigmoids, whose sum is made one and scaled."""
    return {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}


# ---- the tokens that attention sees are chosen by an indexer


def indexer_keys(top_k: int = 16) -> dict[str, Key]:
    """The metadata: attention sees the ``top_k`` tokens of the highest scores."""
    return {
        "attention.indexer.head_count": INDEX_HEADS,
        "attention.indexer.key_length": INDEX_DIM,
        "attention.indexer.top_k": top_k,
    }


def indexer(layer: Layer) -> None:
    """Add the heads' queries, a key per token and the weights of the heads."""
    layer.matrix("indexer.attn_q_b", RANK_QUERY, INDEX_HEADS * INDEX_DIM)
    layer.matrix("indexer.attn_k", layer.shape.n_embd, INDEX_DIM)
    layer.norm("indexer.k_norm", INDEX_DIM, bias=True)
    layer.matrix("indexer.proj", layer.shape.n_embd, INDEX_HEADS)


# ---- attention with a state of constant size in place of a cache (Kimi Delta Attention)


def delta_keys(cached: list[bool]) -> dict[str, Key]:
    """The metadata; the layers that are ``cached`` have latent attention."""
    return {
        "attention.head_count_kv": [int(one) for one in cached],
        "ssm.conv_kernel": _CONV,
        "kda.head_dim": _DELTA_DIM,
    }


def delta_attention(
    layer: Layer, *, forget: str = "f_a f_b", gate: str = "g_a g_b", decay: tuple[int, ...] = ()
) -> None:
    """Add the tensors; ``forget`` and ``gate`` name one projection each or two with a narrow vector between them."""
    embd, n_head = layer.shape.n_embd, layer.shape.n_head
    inner = n_head * _DELTA_DIM
    for name in "qkv":
        layer.matrix(f"attn_{name}", embd, inner)
        layer.tensor(f"ssm_conv1d_{name}.weight", (_CONV, 1, inner), quant="F32")
    for first, *second in (forget.split(), gate.split()):
        layer.matrix(f"ssm_{first}", embd, _DELTA_DIM if second else inner)
        for name in second:
            layer.matrix(f"ssm_{name}", _DELTA_DIM, inner)
    layer.matrix("ssm_beta", embd, n_head)
    layer.tensor("ssm_a", decay or (n_head,), "decay")
    layer.bias("ssm_dt", inner)
    layer.norm("ssm_norm", _DELTA_DIM)
    layer.matrix("attn_output", inner, embd)


# ---- four residual streams in place of one (manifold-constrained hyper-connections)


def stream_keys() -> dict[str, Key]:
    """The metadata."""
    return {
        "hyper_connection.count": STREAMS,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
    }


def streams(layer: Layer) -> None:
    """Add what mixes the streams before and after attention and feed-forward."""
    mixes = (2 + STREAMS) * STREAMS
    for part in ("attn", "ffn"):
        layer.tensor(f"hc_{part}_fn.weight", (STREAMS * layer.shape.n_embd, mixes), quant="F32")
        layer.tensor(f"hc_{part}_base.weight", (mixes,), "bias")
        layer.tensor(f"hc_{part}_scale.weight", (3,), "norm")
