"""A plugin that returns what is no provider and no row."""

from __future__ import annotations

from bmoe import ArchRow, Provider, hookimpl


@hookimpl
def bmoe_caches() -> list:
    return ["lru", Provider("umbra-odd.x", dict, options=dict), Provider("umbra-odd.y", dict, needs=("disk",))]


@hookimpl
def bmoe_sinks() -> dict:
    return {"umbra-odd.z": Provider("umbra-odd.z", dict)}


@hookimpl
def bmoe_archs() -> list[ArchRow]:
    return [ArchRow("odd-moe", ("ffn_up_exps",))]
