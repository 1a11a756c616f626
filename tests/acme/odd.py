"""A plugin that returns what is no provider and no row."""

from __future__ import annotations

from bmoe import ArchRow, Provider, hookimpl


@hookimpl
def bmoe_caches() -> list:
    return ["lru", Provider("acme-odd.x", dict, options=dict), Provider("acme-odd.y", dict, needs=("disk",))]


@hookimpl
def bmoe_sinks() -> dict:
    return {"acme-odd.z": Provider("acme-odd.z", dict)}


@hookimpl
def bmoe_archs() -> list[ArchRow]:
    return [ArchRow("odd-moe", ("ffn_up_exps",))]
