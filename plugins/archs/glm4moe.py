"""GLM-4.5, GLM-4.5-Air and models of their form: sigmoid gating with a selection bias, a dense lead, an MTP layer."""

from __future__ import annotations

from bmoe import hookimpl
from bmoe.contracts import ArchRow


@hookimpl
def bmoe_archs() -> list[ArchRow]:
    """Return the row of GLM-4.5."""
    experts = (("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),)
    return [ArchRow("glm4moe", experts, "sigmoid", selection_bias=True, shared_experts=True, dense_lead=True, mtp=True)]
