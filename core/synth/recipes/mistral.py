"""Mistral's models. Tensors and metadata: ``src/models/deepseek2.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth import latent
from bmoe.synth.latent import Latent
from bmoe.synth.recipe import Recipe, architecture


def mistral4(m: Recipe) -> None:
    """Mistral Small 4: latent attention, softmax gating, a shared expert, gate and up in one tensor."""
    m.keys |= Latent().keys() | {"expert_weights_norm": True, "expert_weights_scale": 1.0}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        Latent().attention(layer)
        latent.feed_forward(layer, selection_bias=False)
    m.output()


ARCHITECTURES = (architecture("mistral4", mistral4, n_shared=1, fused=True),)
