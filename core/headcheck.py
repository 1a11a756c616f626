"""Whether a model has a head for next-token prediction that can be driven: what its headers say, before it is opened.

llama.cpp ends the process where a head is promised and not there, so this is asked first.
"""

from __future__ import annotations

from bmoe.contracts import ModelFacts

ARCHITECTURES = ("glm4moe",)
"""Those whose head was compared with its formula. Others export hidden states by other rules."""

_ASSERTED = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "ffn_gate_inp")


def no_head(facts: ModelFacts) -> str:
    """Why llama.cpp cannot run a head of this model, with the remedy; "" if it can."""
    if facts.arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        return f"no head of architecture {facts.arch!r} can be driven yet (only of {known})"
    if facts.n_nextn != 1:
        found = f"{facts.n_nextn} layers" if facts.n_nextn else "no layer"
        return (
            f"the model has {found} for next-token prediction ({facts.arch}.nextn_predict_layers), "
            "and exactly one can be driven; choose another model or do not draft"
        )
    layer = facts.n_layer - 1
    names = {t.name for t in facts.dense}
    missing = [part for part in _ASSERTED if f"blk.{layer}.{part}.weight" not in names]
    if not missing and not any(bank.layer == layer for bank in facts.nextn_banks):
        missing = ["ffn_gate_exps"]
    if not missing:
        return ""
    return (
        f"the head for next-token prediction lacks blk.{layer}.{missing[0]}.weight; "
        "convert the model again with it (not every converted file has kept the head)"
    )
