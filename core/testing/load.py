"""Finds the provider that a gate tests, by the names under which a user would choose it."""

from __future__ import annotations

from typing import Any

from bmoe.contracts import Provider
from bmoe.errors import PluginError
from bmoe.plugins import load_all
from bmoe.registry import Registry, load_registry

IN_TREE = "bmoe"
"""What a gate of an in-tree plugin says for ``plugin``."""


def load_provider(kind: str, plugin: str, name: str) -> Provider[Any]:
    """The provider ``name`` of ``kind`` from the installed plugin ``plugin``, or from the tree if that is ``"bmoe"``.

    Nothing else is loaded but bmoe's rows, which a plugin may replace. Raises :class:`PluginError` if it is not there.
    """
    registry = load_registry()
    if plugin == IN_TREE:
        row = registry.find(kind, name)
        if row is None:
            raise PluginError(f"registry.toml has no {kind} {name!r}; known: {', '.join(registry.names(kind))}")
        providers = load_all(Registry(rows=(row,))).providers
    else:
        archs = tuple(row for row in registry.rows if row.kind == "arch")
        providers = load_all(Registry(rows=archs), [plugin]).providers
    try:
        return providers[kind][name]
    except KeyError:
        found = ", ".join(providers.get(kind, {})) or "none"
        raise PluginError(f"plugin {plugin!r} provides no {kind} {name!r}; it provides: {found}") from None
