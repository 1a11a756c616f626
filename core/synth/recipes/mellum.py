"""JetBrains' models. Tensors and metadata: ``src/models/mellum.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture
from bmoe.synth.recipes.qwen import qwen3moe


def mellum(m: Recipe) -> None:
    """Mellum2-12B-A2.5B: the layers of Qwen3, a window in three of four, YaRN in the others."""
    m.keys |= {"attention.sliding_window_pattern": [(n + 1) % 4 != 0 for n in range(m.shape.n_layer)]}
    m.keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    m.keys |= {"rope.scaling.original_context_length": 128}
    qwen3moe(m)


ARCHITECTURES = (architecture("mellum", mellum, n_ff=0, window=16, rope_base=5e5),)
