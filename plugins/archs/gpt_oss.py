"""gpt-oss (20b, 120b): gate, up and down with biases, which stay resident; softmax over the selected experts."""

from __future__ import annotations

from bmoe import hookimpl
from bmoe.contracts import ArchRow


@hookimpl
def bmoe_archs() -> list[ArchRow]:
    """Return the row of gpt-oss."""
    # walked from its result, swiglu_oai(gate, up) reaches gate before up
    return [ArchRow("gpt-oss", (("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),), gating="softmax-of-selected")]
