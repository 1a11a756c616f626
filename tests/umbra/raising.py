"""A plugin whose hook raises."""

from __future__ import annotations

from bmoe import hookimpl


@hookimpl
def bmoe_caches() -> list:
    raise RuntimeError("out\nof order")
