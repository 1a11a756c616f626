"""inclusionAI's GroveMoE. Tensors and metadata: ``src/models/grovemoe.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def grovemoe(m: Recipe) -> None:
    """GroveMoE-Inst: a second bank of experts, each of which stands for a pair of those in the first."""
    width, pair = m.shape.head_dim, 2
    m.keys |= {"expert_chunk_feed_forward_length": width, "experts_per_group": pair, "expert_group_scale": 0.05}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        layer.attention(head_norms=True)
        layer.norm("ffn_norm")
        layer.router()
        layer.experts()
        layer.experts(end="chexps", count=m.shape.n_expert // pair, width=width)
    m.output()


ARCHITECTURES = (architecture("grovemoe", grovemoe, n_ff=0, rope_base=1e7, tokenizer="qwen2"),)
