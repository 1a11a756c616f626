"""xAI's models. Tensors and metadata: ``src/models/grok.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def grok(m: Recipe) -> None:
    """Grok-1, Grok-2: norms after attention and experts, capped logits; in Grok-2 a feed-forward beside the experts."""
    m.keys |= {"embedding_scale": 1.5, "logit_scale": 0.5, "attention.output_scale": m.shape.head_dim**-0.5}
    m.keys |= {"attn_logit_softcapping": 30.0, "router_logit_softcapping": 30.0, "final_logit_softcapping": 50.0}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention()
        layer.norm("attn_output_norm")
        layer.norm("ffn_norm")
        layer.ffn()
        layer.router()
        layer.experts()
        layer.norm("post_ffw_norm")
    m.output()


ARCHITECTURES = (architecture("grok", grok, head_dim=16),)
