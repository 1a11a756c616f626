"""``bmoe plugins``: what can be chosen by name, with options and origin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bmoe.cli.arguments import Parser
from bmoe.cli.output import emit, emit_json, emit_table
from bmoe.plugins import Catalog, installed_plugins, load_all
from bmoe.registry import load_registry
from bmoe.telemetry import SCHEMA


def main(arguments: Sequence[str]) -> int:
    """List every provider that can be loaded, and the installed plugins that are not enabled."""
    parser = Parser(
        "bmoe plugins",
        "List the plugins that a profile can name: bmoe's own, and installed ones given with --enable.",
        "bmoe plugins --enable acme --json",
    )
    parser.add_argument("--enable", action="append", default=[], metavar="NAME", help="load this installed plugin too")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the options of each plugin")
    parsed = parser.parse(arguments)
    catalog = load_all(load_registry(), parsed.enable, "--enable")
    found = list_providers(catalog)
    others = sorted(set(installed_plugins()) - set(parsed.enable))
    if parsed.json:
        emit_json({"schema": SCHEMA, "plugins": found, "not_enabled": others}, indent=2)
        return 0
    emit_table(
        ("kind", "name", "marks", "summary", "from"),
        [(p["kind"], p["name"], _marks(p), p["unavailable"] or p["summary"], p["origin"]) for p in found],
    )
    if others:
        emit(f"\ninstalled but not enabled: {', '.join(others)} (name them in plugins.enable of a profile)\n")
    return 0


def list_providers(catalog: Catalog) -> list[dict[str, Any]]:
    """Every provider of ``catalog``, by kind and name, as plain data; ``unavailable`` says why this machine cannot."""
    return [
        {
            "kind": kind,
            "name": name,
            "summary": provider.summary,
            "origin": catalog.origin(kind, name),
            "lossy": provider.lossy,
            "experimental": catalog.is_experimental(kind, name),
            "unavailable": provider.available(),
            "needs": list(provider.needs),
            "excludes": list(provider.excludes),
            "options": provider.options.model_json_schema().get("properties", {}),
        }
        for kind, providers in catalog.providers.items()
        for name, provider in sorted(providers.items())
    ]


def _marks(provider: dict[str, Any]) -> str:
    marks = [mark for mark in ("lossy", "experimental") if provider[mark]]
    if provider["unavailable"]:
        marks.append("not here")
    return ", ".join(marks) or "-"
