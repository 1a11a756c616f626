"""Meta's models, and others with Llama's layers. Tensors and metadata: ``src/models`` of llama.cpp, a file for each."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def llama(m: Recipe) -> None:
    """Mixtral-8x7B, 8x22B, and what is merged from Llama's or Mistral's models in their form."""
    m.keys |= {"rope.dimension_count": m.shape.head_dim}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention()
        layer.norm("ffn_norm")
        layer.router()
        layer.experts()
    m.output()


def mistral3(m: Recipe) -> None:
    """No known model with experts; llama.cpp takes a Mixtral in Ministral 3's form: YaRN, scaled with the position."""
    m.keys |= {"attention.temperature_scale": 0.1, "rope.scaling.type": "yarn", "rope.scaling.factor": 16.0}
    m.keys |= {"rope.scaling.original_context_length": 32, "rope.scaling.yarn_log_multiplier": 1.0}
    llama(m)


def minicpm(m: Recipe) -> None:
    """MiniCPM-MoE-8x2B: embeddings, residuals and logits are scaled."""
    m.keys |= {"embedding_scale": 1.5, "residual_scale": 0.7, "logit_scale": 0.5}
    llama(m)


def smallthinker(m: Recipe) -> None:
    """SmallThinker-4BA0.6B, 21BA3B: the layer's input is routed, before attention; sigmoid gating, ReLU experts."""
    m.keys |= {"expert_gating_func": 2}
    llama(m)


def llama4(m: Recipe) -> None:
    """Llama-4-Scout, Maverick: one expert per token and a shared one; in Maverick every other layer is dense."""
    m.keys |= {"interleave_moe_layer_step": 2, "rope.dimension_count": m.shape.head_dim}
    m.embedding()
    m.norm("rope_freqs", m.shape.head_dim // 2)
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention()
        layer.norm("ffn_norm")
        if layer.number % 2:
            layer.router()
            layer.experts()
            layer.shared()
        else:
            layer.ffn()
    m.output()


ARCHITECTURES = (
    architecture("llama", llama, n_ff=0),
    architecture("llama-embed", llama, n_ff=0),
    architecture("mistral3", mistral3, n_ff=0),
    architecture("minicpm", minicpm, n_ff=0),
    # the window's layers turn, the others have no positions; llama.cpp sets the window itself
    architecture("smallthinker", smallthinker, n_ff=0, n_layer=5, window=4096),
    architecture("llama4", llama4, n_layer=6, n_used=1),
)
