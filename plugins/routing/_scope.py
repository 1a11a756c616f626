"""Where a knob acts: while a text is generated, in the prompt, or in both."""

from __future__ import annotations

from typing import Literal

Scope = Literal["decode", "prefill", "both"]
_GENERATED, _PROMPT = frozenset({"decode", "draft", "verify"}), frozenset({"prefill"})


def phases(scope: Scope) -> frozenset[str]:
    """The kinds of batches that a scope covers."""
    return {"decode": _GENERATED, "prefill": _PROMPT, "both": _GENERATED | _PROMPT}[scope]
