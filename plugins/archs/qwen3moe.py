"""Qwen3 mixture-of-experts (30B-A3B, 235B-A22B): separate gate and up, every layer routed."""

from __future__ import annotations

from bmoe import hookimpl
from bmoe.contracts import ArchRow


@hookimpl
def bmoe_archs() -> list[ArchRow]:
    """Return the row of Qwen3."""
    # up is built first, but the graph is walked from its result: swiglu(gate, up) reaches gate before up
    return [ArchRow("qwen3moe", (("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),), gating="softmax")]
