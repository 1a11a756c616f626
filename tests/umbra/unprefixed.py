"""A plugin whose provider lacks its prefix."""

from __future__ import annotations

from bmoe import Provider, hookimpl


@hookimpl
def bmoe_caches() -> list[Provider]:
    return [Provider("hotset", dict)]
