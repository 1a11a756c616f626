"""Moonshot's models. Tensors and metadata: ``src/models/kimi-*.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth import latent
from bmoe.synth.latent import Latent
from bmoe.synth.recipe import Layer, Recipe, architecture


def kimi_linear(m: Recipe) -> None:
    """Kimi-Linear-48B-A3B: delta attention, in some layers latent attention."""
    m.keys |= Latent().keys() | latent.sigmoid_keys()
    m.keys |= latent.delta_keys([_is_cached(number) for number in range(m.shape.n_layer)])
    del m.keys["attention.q_lora_rank"]
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        if _is_cached(layer.number):
            Latent().attention(layer, plain_query=True)
        else:
            latent.delta_attention(layer, decay=(1, m.shape.n_head))
        latent.feed_forward(layer)
    m.output()


def kimi_k3(m: Recipe) -> None:
    """Kimi-K3: the routed experts read a narrower vector; attention to what earlier layers left in the residual."""
    m.keys |= Latent().keys() | latent.sigmoid_keys()
    m.keys |= latent.delta_keys([_is_cached(number) for number in range(m.shape.n_layer)])
    m.keys |= {"kda.gate_lower_bound": -5.0, "attn_res.block_size": 2, "expert_latent_length": m.shape.n_embd // 2}
    m.keys |= {"activation.situ_beta": 4.0, "activation.situ_linear_beta": 4.0}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.tensor("attn_res_score.weight", (m.shape.n_embd,))
        layer.tensor("ffn_res_score.weight", (m.shape.n_embd,))
        if _is_cached(layer.number):
            Latent().attention(layer)
            layer.matrix("attn_gate", m.shape.n_embd, m.shape.n_head * Latent().value)
        else:
            latent.delta_attention(layer, gate="g")
        _narrow_experts(layer)
    m.tensor("output_res_score.weight", (m.shape.n_embd,))
    m.output()


def _narrow_experts(layer: Layer) -> None:
    layer.norm("ffn_norm")
    if layer.is_dense:
        layer.ffn()
        return
    wide, narrow = layer.shape.n_embd, layer.shape.n_embd // 2
    layer.router(selection_bias=True)
    layer.matrix("ffn_routed_down", wide, narrow)
    layer.experts(n_in=narrow)
    layer.norm("ffn_routed_norm", narrow)
    layer.matrix("ffn_routed_up", narrow, wide)
    layer.shared()


def _is_cached(number: int) -> bool:
    return number % 2 == 1


ARCHITECTURES = (
    architecture("kimi-linear", kimi_linear, n_dense=1, n_shared=1),
    architecture("kimi-k3", kimi_k3, n_embd=128, n_dense=1, n_shared=2),
)
