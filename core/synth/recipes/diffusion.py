"""Models that fill in masked tokens. Tensors and metadata: ``src/models/llada-moe.cpp``, ``rnd1.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture
from bmoe.synth.recipes.qwen import qwen3moe


def diffusion(m: Recipe) -> None:
    """LLaDA-MoE-7B-A1B, RND1-Base: the layers of Qwen3; a token attends to all of its batch, and nothing is kept."""
    m.keys |= {"attention.causal": False}
    qwen3moe(m)


ARCHITECTURES = (
    architecture("llada-moe", diffusion, head_dim=16, n_head_kv=4, n_ff=0),
    architecture("rnd1", diffusion, n_ff=0),
)
