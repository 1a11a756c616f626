"""OpenAI's models. Tensors and metadata: ``src/models/openai-moe.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def gpt_oss(m: Recipe) -> None:
    """gpt-oss-20b, 120b: biases everywhere, attention sinks, a window in every other layer."""
    if m.shape.name == "gpt-oss-120b":
        m.keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0}
        m.keys |= {"rope.scaling.original_context_length": 4096}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention(biases=("q", "k", "v", "output"))
        layer.tensor("attn_sinks.weight", (m.shape.n_head,), "bias")
        layer.norm("post_attention_norm")
        layer.router(bias=True)
        layer.experts(bias=True)
    m.output()


ARCHITECTURES = (
    architecture(
        "gpt-oss", gpt_oss, n_embd=192, n_ff_exp=192, n_ctx=2048, n_ff=0, quant="MXFP4", rope_base=150000.0, window=16
    ),
)
