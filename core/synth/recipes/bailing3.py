"""InclusionAI's third generation. Tensors and metadata: ``src/models/bailingmoe3.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth import latent
from bmoe.synth.latent import Latent
from bmoe.synth.recipe import Layer, Recipe, architecture


def bailingmoe3(m: Recipe) -> None:
    """Ling 3.0: delta attention, in some layers latent attention; a dense lead, a shared expert, a selection bias."""
    cached = [number % 2 == 1 for number in range(m.shape.n_layer)]
    m.keys |= Latent().keys() | latent.delta_keys([*cached, *[True] * m.shape.n_nextn]) | latent.sigmoid_keys()
    m.keys |= {"kda.safe_gate": True, "kda.gate_lower_bound": -5.0}
    m.keys |= {"expert_shared_feed_forward_length": m.shape.n_ff_exp}
    m.output()
    m.embedding()
    for layer in m.layers():
        _bailingmoe3(layer, cached[layer.number])
    for layer in m.heads():
        _bailingmoe3(layer, True)
        layer.matrix("nextn.eh_proj", 2 * m.shape.n_embd, m.shape.n_embd)
        for name in ("nextn.enorm", "nextn.hnorm", "layer_output_norm"):
            layer.norm(name)


def _bailingmoe3(layer: Layer, cached: bool) -> None:
    layer.norm("attn_norm")
    if cached:
        Latent().attention(layer)
        layer.matrix("attn_gate", layer.shape.n_embd, layer.shape.n_head)
    else:
        latent.delta_attention(layer, forget="f_a", gate="g_a", decay=(1, layer.shape.n_head))
    latent.feed_forward(layer)


ARCHITECTURES = (architecture("bailingmoe3", bailingmoe3, n_dense=1, n_shared=1, n_nextn=1),)
