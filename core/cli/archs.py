"""``bmoe archs``: the architectures whose experts can be streamed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bmoe.cli.arguments import Parser
from bmoe.cli.output import emit, emit_json, emit_table
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
    parser.add_argument(
        "--archs", action="append", default=[], metavar="FILE", help="TOML file with more architecture rows"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse(arguments)
    catalog = load_all(load_registry(), parsed.enable, "--enable", parsed.archs)
    rows = [catalog.archs[name] for name in sorted(catalog.archs)]
    if parsed.json:
        listed = [{**dataclasses.asdict(row), "origin": catalog.origin("arch", row.name)} for row in rows]
        emit_json({"schema": SCHEMA, "archs": listed}, indent=2)
        return 0
    emit_table(
        ("name", "models", "gating", "also has", "experts"),
        [
            (row.name, _models(row, catalog.origin("arch", row.name)), row.gating, _traits(row), _experts(row))
            for row in rows
        ],
    )
    refused = sum(bool(row.cannot) for row in rows)
    emit(f"\n{len(rows)} architectures{f', {refused} of them cannot be run' if refused else ''}\n")
    return 0


def _models(row: ArchRow, origin: str) -> str:
    refused = f"cannot be run: it {row.cannot}" if row.cannot else ""
    elsewhere = "" if origin.startswith("bmoe_plugins.") else f"from {origin}"
    return "; ".join(filter(None, (row.notes, refused, elsewhere))) or "-"


def _experts(row: ArchRow) -> str:
    """Gate, up and down of ``ffn_gate_exps`` and so on, since nearly every name has this form."""
    banks = (" ".join(name.removeprefix("ffn_").removesuffix("_exps") for name in bank) for bank in row.experts)
    return " | ".join(banks)


def _traits(row: ArchRow) -> str:
    return ", ".join(trait.replace("_", " ") for trait in row.has) or "-"
