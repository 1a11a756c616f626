"""A plugin with a hook that does not exist."""

from __future__ import annotations

from bmoe import hookimpl


@hookimpl
def bmoe_cachez() -> list:
    return []
