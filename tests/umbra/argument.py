"""A plugin whose hook asks for an argument that the hook does not have."""

from __future__ import annotations

from bmoe import hookimpl


@hookimpl
def bmoe_caches(budget) -> list:
    return [budget]
