"""Zhipu's models. Tensors and metadata: ``src/models/glm*.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth import latent
from bmoe.synth.latent import INDEX_DIM, Latent
from bmoe.synth.recipe import Layer, Recipe, architecture


def glm4moe(m: Recipe) -> None:
    """GLM-4.5, GLM-4.5-Air: a dense lead, shared experts, sigmoid gating with a selection bias, next-token prediction.

    The head for next-token prediction is the last of the file, as llama.cpp's quantiser puts it: what is not loaded is
    then at the end, and llama.cpp unmaps it.
    """
    m.keys |= {"rope.dimension_count": m.shape.head_dim // 2}
    m.keys |= {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5}
    m.output()
    m.embedding()
    for layer in m.layers():
        _glm4moe(layer)
    for layer in m.heads():
        _glm4moe(layer)
        layer.nextn()


def _glm4moe(layer: Layer) -> None:
    layer.norm("attn_norm")
    layer.attention(biases=("q", "k", "v"), head_norms=True)
    layer.norm("post_attention_norm")
    if layer.is_dense:
        layer.ffn()
        return
    layer.router(selection_bias=True)
    layer.experts()
    layer.shared()


def glm_dsa(m: Recipe) -> None:
    """GLM-5, 5.2: latent attention to the tokens that an indexer chooses, for some layers that of a layer before."""
    full = [number % 2 == 0 for number in range(m.shape.n_layer)]
    m.keys |= Latent().keys() | latent.indexer_keys() | latent.sigmoid_keys()
    m.keys |= {"attention.indexer.types": full}
    m.output()
    m.embedding()
    for layer in m.layers():
        _glm_dsa(layer, full[layer.number])
    for layer in m.heads():
        _glm_dsa(layer, True)
        layer.nextn()


def _glm_dsa(layer: Layer, full: bool) -> None:
    layer.norm("attn_norm")
    Latent().attention(layer)
    if full:
        latent.indexer(layer)
    latent.feed_forward(layer)


_POOL = 4
_STILL = Latent(rope=0)


def glm5_next(m: Recipe) -> None:
    """GLM-5.3-Flash: delta attention, in some layers latent attention to pools of tokens; four residual streams."""
    cached = [number % 2 == 1 for number in range(m.shape.n_layer)]
    m.keys |= _STILL.keys() | latent.delta_keys([*cached, *[True] * m.shape.n_nextn]) | latent.sigmoid_keys()
    m.keys |= latent.indexer_keys() | latent.stream_keys() | {"kda.gate_lower_bound": -5.0}
    m.keys |= {"attention.indexer.kpool": _POOL, "attention.indexer.kpool_select_tail": True}
    m.keys |= {"attention.layer_norm_epsilon": 1e-6, "swiglu_clamp_exp": [10.0] * m.shape.n_block}
    m.output()
    m.embedding()
    for layer in m.layers():
        latent.streams(layer)
        _glm5_next(layer, cached[layer.number])
    for layer in m.heads():
        _glm5_next(layer, True)
        layer.nextn()


def _glm5_next(layer: Layer, cached: bool) -> None:
    layer.norm("attn_norm")
    if cached:
        _STILL.attention(layer)
        latent.indexer(layer)
        layer.matrix("indexer_compressor_gate", layer.shape.n_embd, INDEX_DIM)
        layer.tensor("indexer_compressor_ape.weight", (INDEX_DIM, _POOL), "bias")
    else:
        latent.delta_attention(layer)
    latent.feed_forward(layer)


ARCHITECTURES = (
    # 3 x 96 x 128 weights: an expert of a small trained model, no multiple of a page in any quantisation
    architecture("glm4moe", glm4moe, n_embd=128, n_ctx=2048, n_ff=192, n_dense=1, n_shared=1, n_nextn=1),
    architecture("glm-dsa", glm_dsa, n_dense=1, n_shared=1, n_nextn=1),
    architecture("glm5-next", glm5_next, n_dense=1, n_shared=1, n_nextn=1),
)
