"""``bmoe inspect``: what a model file is, on one screen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from bmoe.bundled import find_model
from bmoe.cli.arguments import Parser
from bmoe.cli.output import emit, emit_json, emit_table
from bmoe.contracts import BankFacts, ModelFacts
from bmoe.inspection import Inspection, inspect_model
from bmoe.plugins import load_all
from bmoe.registry import load_registry
from bmoe.telemetry import SCHEMA


def main(arguments: Sequence[str]) -> int:
    """Print what the file is; 0 also if it cannot be streamed, which is part of the answer."""
    parser = Parser(
        "bmoe inspect",
        "Tell what a model file is: its architecture, layers, experts and sizes, its quantisation, and whether it can\n"
        "be streamed. Only headers are read.",
        "bmoe inspect model.gguf",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="the model file, of several the first; or the name of a bundled one"
    )
    parser.add_argument("--enable", action="append", default=[], metavar="NAME", help="load this installed plugin too")
    parser.add_argument(
        "--archs", action="append", default=[], metavar="FILE", help="TOML file with more architecture rows"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse(arguments)
    catalog = load_all(load_registry(), parsed.enable, "--enable", parsed.archs)
    found = inspect_model(find_model(parsed.model), catalog.archs)
    if parsed.json:
        emit_json(as_json(found), indent=2)
        return 0
    for label, text in describe(found):
        emit(f"{label:21}  {_shown(text)}\n")
    rows = [(c.name, ", ".join(f"{n} {kind}" for kind, n in c.types.items()), _size(c.nbytes)) for c in found.classes]
    if rows:
        emit("\n")
        emit_table(("tensors", "types", "size"), rows)
    return 0


def describe(found: Inspection) -> Iterator[tuple[str, str]]:
    """Label and text of each line."""
    yield "model", found.name or "without a name"
    yield "architecture", _architecture(found)
    yield "can be streamed", "yes" if found.facts else f"no: {found.reason}"
    facts = found.facts
    yield "layers", _layers(found)
    if facts is not None:
        yield "experts", _experts(facts)
        yield "next-token prediction", _prediction(facts)
    elif found.n_expert:
        yield "experts", f"{found.n_expert} a layer"
    yield "size", _sizes(found)
    if len(found.shards) > 1:
        yield "shards", f"{len(found.shards)}, of {_range([nbytes for _, nbytes in found.shards])}"
    limits = (("context", found.n_ctx_train), ("embedding", found.n_embd), ("vocabulary", found.n_vocab))
    yield "dimensions", " · ".join(f"{name} {number}" for name, number in limits if number is not None) or "not said"
    template = found.chat_template
    yield "chat template", f"yes, {len(template)} characters" if template else "none"


def _architecture(found: Inspection) -> str:
    if found.row is None:
        return f"{found.arch or 'not said'} (no row)"
    traits = [f"{found.row.gating} gating", *(trait.replace("_", " ") for trait in found.traits)]
    return f"{found.arch} ({', '.join(traits)})"


def _layers(found: Inspection) -> str:
    if found.n_layer is None:
        return "not said"
    if found.facts is None:
        return str(found.n_layer)
    trunk = found.facts.n_layer - found.facts.n_nextn
    routed = {bank.layer for bank in found.facts.banks}
    with_experts = "all with experts" if len(routed) == trunk else f"{len(routed)} of them with experts"
    return f"{trunk}, {with_experts}"


def _experts(facts: ModelFacts) -> str:
    counts = _span([bank.n_expert for bank in facts.banks])
    used = _span([bank.n_used for bank in facts.banks])
    banks = max(bank.bank for bank in facts.banks) + 1
    each = _range([bank.entry_bytes for bank in facts.banks])
    return f"{counts} a layer, {used} used, {each} each" + (f", in {banks} banks" if banks > 1 else "")


def _prediction(facts: ModelFacts) -> str:
    if not facts.n_nextn:
        return "none"
    layers = "1 layer" if facts.n_nextn == 1 else f"{facts.n_nextn} layers"
    experts = sum(bank.nbytes for bank in facts.nextn_banks)
    return f"{layers} after these" + (f", with experts of {_size(experts)}" if experts else "")


def _sizes(found: Inspection) -> str:
    parts = [_size(found.file_bytes)]
    if found.facts is not None:
        parts += [
            f"experts {_size(found.facts.expert_bytes)}",
            f"dense {_size(found.facts.dense_bytes)}",
            f"one token's experts {_size(found.facts.cycle_bytes)}",
        ]
    return " · ".join(parts)


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _range(sizes: Sequence[int]) -> str:
    low, high = _size(min(sizes)), _size(max(sizes))
    return low if low == high else f"{low} to {high}"


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"


def _shown(text: str) -> str:
    """Text of a file as a line that no terminal acts on."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def as_json(found: Inspection) -> dict[str, Any]:
    """All of it as plain data."""
    facts = found.facts
    return {
        "schema": SCHEMA,
        "path": found.path,
        "name": found.name,
        "arch": found.arch,
        "row": dataclasses.asdict(found.row) if found.row else None,
        "has": list(found.traits),
        "streams": facts is not None,
        "reason": found.reason or None,
        "shards": [{"path": path, "bytes": nbytes} for path, nbytes in found.shards],
        "file_bytes": found.file_bytes,
        "expert_bytes": facts.expert_bytes if facts else None,
        "dense_bytes": facts.dense_bytes if facts else None,
        "cycle_bytes": facts.cycle_bytes if facts else None,
        "n_layer": found.n_layer,
        "n_nextn": facts.n_nextn if facts else None,
        "n_expert": found.n_expert,
        "n_ctx_train": found.n_ctx_train,
        "n_embd": found.n_embd,
        "n_vocab": found.n_vocab,
        "chat_template": found.chat_template is not None,
        "banks": [_bank(bank) for bank in facts.banks] if facts else [],
        "tensors": [
            {"class": c.name, "types": dict(c.types), "count": c.count, "bytes": c.nbytes} for c in found.classes
        ],
    }


def _bank(bank: BankFacts) -> dict[str, Any]:
    return {
        "layer": bank.layer,
        "bank": bank.bank,
        "n_expert": bank.n_expert,
        "n_used": bank.n_used,
        "entry_bytes": bank.entry_bytes,
        "projections": {p.suffix: p.type_name for p in bank.projections},
        "shards": sorted({p.shard for p in bank.projections}),
    }
