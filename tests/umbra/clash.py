"""A plugin that takes the name of a row of bmoe, and provides one name of its own twice."""

from __future__ import annotations

from bmoe import ArchRow, Provider, hookimpl


@hookimpl
def bmoe_archs() -> list[ArchRow]:
    return [ArchRow("qwen3moe", (("ffn_up_exps",),))]


@hookimpl
def bmoe_caches() -> list[Provider]:
    return [Provider("umbra-clash.one", dict), Provider("umbra-clash.one", dict)]
