"""``bmoe archs``: the architectures whose experts can be streamed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bmoe.cli.arguments import Parser
from bmoe.cli.output import emit_json, emit_table
from bmoe.contracts import ArchRow
from bmoe.plugins import load_all
from bmoe.registry import load_registry
from bmoe.telemetry import SCHEMA


def main(arguments: Sequence[str]) -> int:
    """List every architecture row, with its expert tensors in the order in which the graph uses them."""
    parser = Parser(
        "bmoe archs",
        "List the architectures whose experts can be streamed; a plugin or a TOML file can add a row.",
        "bmoe archs --json",
    )
    parser.add_argument("--enable", action="append", default=[], metavar="NAME", help="load this installed plugin too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse(arguments)
    catalog = load_all(load_registry(), parsed.enable, "--enable")
    rows = [catalog.archs[name] for name in sorted(catalog.archs)]
    if parsed.json:
        listed = [{**dataclasses.asdict(row), "origin": catalog.origin("arch", row.name)} for row in rows]
        emit_json({"schema": SCHEMA, "archs": listed}, indent=2)
        return 0
    emit_table(
        ("name", "gating", "expert tensors", "traits", "from"),
        [(row.name, row.gating, _experts(row), _traits(row), catalog.origin("arch", row.name)) for row in rows],
    )
    return 0


def _experts(row: ArchRow) -> str:
    return " | ".join(" ".join(bank) for bank in row.experts)


def _traits(row: ArchRow) -> str:
    names = ("selection_bias", "expert_groups", "shared_experts", "dense_lead", "mtp")
    return ", ".join(name.replace("_", " ") for name in names if getattr(row, name)) or "-"
