"""A plugin that replaces a row of bmoe on purpose."""

from __future__ import annotations

from bmoe import ArchRow, hookimpl


@hookimpl
def bmoe_archs() -> list[ArchRow]:
    return [ArchRow("qwen3moe", (("ffn_up_exps",),), replaces="qwen3moe")]
