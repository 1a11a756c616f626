"""``bmoe fit``: whether a model runs here and how fast, before it is run or even downloaded."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmoe.bundled import find_model
from bmoe.cli.arguments import Parser, UsageError
from bmoe.cli.folders import fetch_memory
from bmoe.cli.output import emit, emit_json, emit_table
from bmoe.contracts import ModelFacts
from bmoe.errors import ModelError
from bmoe.layout import read_model
from bmoe.machine import read_machine
from bmoe.plugins import load_all
from bmoe.registry import load_registry
from bmoe.telemetry import SCHEMA

if TYPE_CHECKING:
    from bmoe.costs import DecodeCost
    from bmoe.fit.verdict import Fit

_MIB = 1 << 20
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt]?)(i?)b?", re.ASCII | re.IGNORECASE)
_SYNTHETIC = "synthetic "


def main(arguments: Sequence[str]) -> int:
    """Print the answer; 0 also if the model does not run here, which is an answer too."""
    parsed = _parse(arguments)
    with model_facts(parsed.model) as (facts, fetched):
        fit = judge_here(parsed, facts, remote=fetched is not None)
        cost = _run(parsed, fit) if parsed.run and fit.runs else None
        if parsed.json:
            emit_json(as_json(parsed.model, fit, fetched, cost), indent=2)
            return 0
        for label, text in describe(fit, fetched):
            emit(f"{label:17}  {text}\n")
        if fit.advice:
            emit("\n")
            emit_table(("what would help", "times as fast"), [(a.what, f"{a.gain:.2f}") for a in fit.advice])
        if cost is not None:
            emit("\n")
            emit_table(("", "tok/s", "hit rate", "MiB/token"), list(compare(fit, cost)))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "bmoe fit",
        "Tell whether a model runs on this machine, with which profile and how fast, from its header, the drive's\n"
        "speed at the size of its experts, the processor's and the memory. Of a model on a server only the header is\n"
        "fetched, of all of its shards.",
        "bmoe fit model.gguf --memory 12GB",
    )
    add_fit_arguments(parser, "the model file, of several the first; the name of a bundled one; or http(s)://…")
    parser.add_argument("--hit-rate", metavar="R", type=float, help="0 to 1: expect this hit rate")
    parser.add_argument("--profile", metavar="NAME|PATH", help="this profile instead of the one that is chosen")
    parser.add_argument("--run", action="store_true", help="run it as well, and print what was measured beside it")
    parser.add_argument("-n", "--tokens", metavar="N", type=int, help="tokens that --run decodes (64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse(arguments)
    if parsed.hit_rate is not None and not 0 <= parsed.hit_rate <= 1:
        raise UsageError(f"--hit-rate {parsed.hit_rate:g}: is not between 0 and 1; example: {parser.example}")
    if parsed.tokens is not None and (not parsed.run or parsed.tokens < 1):
        why = "at least one has to be asked for" if parsed.run else "only --run decodes tokens"
        raise UsageError(f"-n {parsed.tokens}: {why}; example: {parser.example}")
    from bmoe.fit.remote import is_url

    if parsed.run and is_url(parsed.model):
        raise UsageError("--run: a model on a server cannot be run; download it and name the file")
    return parsed


def add_fit_arguments(parser: Parser, model: str) -> None:
    """What ``fit`` and ``profile make`` are both told: the model, memory, drive and values of the profile."""
    parser.add_argument("model", metavar="MODEL|URL" if "http" in model else "MODEL", help=model)
    parser.add_argument("--memory", metavar="SIZE", type=str, help="memory to count with (12GB, 8192MiB); what is free")
    parser.add_argument(
        "--drive", metavar="PATH", help="measure this file or folder's drive; needed where the model will be elsewhere"
    )
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="fix one key of the profile"
    )


@contextlib.contextmanager
def model_facts(name: str) -> Iterator[tuple[ModelFacts, int | None]]:
    """What a model's headers say, and how many bytes came from a server for it; None for a file.

    Raises :class:`ModelError`, with the address in the place of a file that stands for it.
    """
    from bmoe.fit import remote

    rows = load_all(load_registry()).archs
    if not remote.is_url(name):
        yield read_model(find_model(name), rows), None
        return
    with tempfile.TemporaryDirectory(prefix="bmoe-fit-") as folder:
        fetched = remote.fetch_headers(name, Path(folder))
        try:
            facts = read_model(fetched.path, rows)
        except ModelError as error:
            raise ModelError(remote.addressed(str(error), Path(folder), name)) from error
        yield facts, fetched.nbytes


def judge_here(parsed: argparse.Namespace, facts: ModelFacts, *, remote: bool = False) -> Fit:
    """The answer for this machine. Raises what measuring raises, and :class:`UsageError` for a size that is none."""
    from bmoe.fit.choose import Wish
    from bmoe.fit.verdict import judge

    given = vars(parsed)
    memory = None if parsed.memory is None else size_of(parsed.memory)
    wish = Wish(given.get("profile"), tuple(parsed.overrides), memory)
    catalog = load_all(load_registry())
    return judge(
        facts,
        catalog,
        read_machine(),
        wish,
        hit_rate=given.get("hit_rate"),
        place=parsed.drive,
        remote=remote,
        remember=fetch_memory(),
    )


def size_of(text: str) -> int:
    """Bytes of ``12GB``, ``8192MiB`` or a plain number of bytes; raises :class:`UsageError`."""
    match = _SIZE.fullmatch(text.strip())
    number = float(match[1]) if match else 0.0
    if match is None or not 0 < number < math.inf:
        raise UsageError(f"--memory {text}: is no size; write it like 12GB or 8192MiB")
    step = 1024 if match[3] else 1000
    nbytes = number * step ** ("", "k", "m", "g", "t").index(match[2].lower())
    if not _MIB <= nbytes < 1 << 62:
        raise UsageError(f"--memory {text}: is {nbytes:g} bytes, which no machine has; write it like 12GB or 8192MiB")
    return int(nbytes)


def _run(parsed: argparse.Namespace, fit: Fit) -> DecodeCost:
    from bmoe.fit.trial import run

    overrides = [*(setting.override for setting in fit.choice.settings), *parsed.overrides]
    return run(fit.choice.name, find_model(parsed.model), overrides, parsed.tokens or 64, fetch_memory())


def describe(fit: Fit, fetched: int | None) -> Iterator[tuple[str, str]]:
    """Label and text of each line."""
    from bmoe.fit.verdict import held_share

    facts, choice = fit.facts, fit.choice
    size = f"{_size(facts.file_bytes)}, of it experts {_size(facts.expert_bytes)}"
    came = f"; {_size(fetched)} of it were fetched" if fetched is not None else ""
    yield "model", _shown(f"{facts.name} ({facts.arch}), {size}{came}")
    free = "unknown" if fit.memory_bytes is None else _size(fit.memory_bytes)
    yield "memory", f"{free} free"
    if not fit.runs:
        yield "runs here", f"no: {_shown(fit.reason)}"
        return
    plan, found, hits, measured = choice.plan, fit.estimate, fit.hits, fit.measured
    assert plan is not None
    assert found is not None
    assert hits is not None
    assert measured is not None
    processor, drive = measured.processor, measured.drive
    yield "runs here", "yes"
    yield "profile", f"{choice.name}: {choice.why}"
    for setting in choice.settings:
        yield "", f"{setting.path} = {setting.value}: {setting.why}"
    if plan.streaming:
        count = _entries(facts)
        held = f"{_size(plan.budget.bytes)}, some {held_share(plan) * count:.0f} of {count} experts"
        yield "cache", held if plan.budget.bytes else "off"
        yield "expected hit rate", f"{_percent(hits)}: {hits.why}"
        if facts.name.startswith(_SYNTHETIC):
            yield "", "its weights are random, and so is its routing: it will hit at another rate (--hit-rate)"
        yield "read per token", f"{found.bytes_per_token / _MIB:.1f} MiB"
    yield "speed", f"{found.low:.3g} to {found.high:.3g} tok/s"
    parts = (("computing", found.compute_s), ("reading", found.read_s), ("making room", found.manage_s))
    yield "time of a token", " · ".join(f"{what} {1e3 * each:.1f} ms" for what, each in parts if each)
    if drive is not None:
        rate = f"{measured.costs.bandwidth / 1e9:.2f} GB/s in experts of {_size(drive.slice_bytes)}"
        path = "direct" if drive.direct else "through the page cache"
        yield "drive", f"{rate}, one alone {1e3 * drive.first_s:.2f} ms ({drive.fetcher}, {path})"
    rates = ", ".join(f"{kind} {rate:.1f}" for kind, rate in processor.products)
    threads = "1 thread" if processor.threads == 1 else f"{processor.threads} threads"
    yield "processor", f"{threads}, products in GB/s: {rates}"


def compare(fit: Fit, cost: DecodeCost) -> Iterator[tuple[str, str, str, str]]:
    """Rows of what was predicted and what was measured."""
    assert fit.estimate is not None
    share = _share(fit, cost)
    given = f"{100 * share:.0f} % of the processor"
    if cost.lookups:
        given = f"hit rate and {given}"
    rows = (("predicted", fit.estimate), (f"predicted, given the run's {given}", fit.at(_hits(cost), share)))
    for label, found in rows:
        speed = f"{found.low:.3g} to {found.high:.3g}"
        yield label, speed, f"{100 * found.hit_rate:.1f} %", f"{found.bytes_per_token / _MIB:.1f}"
    rate = f"{100 * _hits(cost):.1f} %" if cost.lookups else "-"
    read = "-" if cost.read_bytes is None else f"{_read(cost) / _MIB:.1f}"
    yield "measured", f"{cost.decodes / cost.decode_s:.3g}", rate, read


def _share(fit: Fit, cost: DecodeCost) -> float:
    from bmoe.fit.overhead import granted

    assert fit.measured is not None
    return granted(cost, fit.measured.processor.threads)


def _hits(cost: DecodeCost) -> float:
    return (cost.hits or 0) / cost.lookups if cost.lookups else 1.0


def _read(cost: DecodeCost) -> float:
    """Bytes per token, of all that was read."""
    return ((cost.read_bytes or 0) + (cost.ahead_bytes or 0)) / cost.decodes


def _percent(hits: Any) -> str:
    low, high = (f"{100 * each:.0f}" for each in (hits.low, hits.high))
    middle = f"{100 * hits.expected:.0f} %"
    return middle if low == high else f"{middle} ({low} to {high})"


def _entries(facts: ModelFacts) -> int:
    return sum(bank.n_expert for bank in facts.banks)


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"


def _shown(text: str) -> str:
    """Text of a file as a line that no terminal acts on."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def as_json(model: str, fit: Fit, fetched: int | None, cost: DecodeCost | None) -> dict[str, Any]:
    """All of it as plain data; null is what is not known or does not apply."""
    import dataclasses

    from bmoe.fit.remote import is_url, shown

    choice, plan, found, measured = fit.choice, fit.choice.plan, fit.estimate, fit.measured
    drive = measured.drive if measured else None
    return {
        "schema": SCHEMA,
        "model": shown(model) if is_url(model) else model,
        "name": fit.facts.name,
        "arch": fit.facts.arch,
        "file_bytes": fit.facts.file_bytes,
        "expert_bytes": fit.facts.expert_bytes,
        "fetched_bytes": fetched,
        "memory_bytes": fit.memory_bytes,
        "runs": fit.runs,
        "reason": fit.reason or None,
        "profile": choice.name if fit.runs else None,
        "why": choice.why,
        "settings": [dataclasses.asdict(setting) for setting in choice.settings],
        "budget_bytes": plan.budget.bytes if plan is not None and plan.streaming else None,
        "hit_rate": dataclasses.asdict(fit.hits) if fit.hits else None,
        "bytes_per_token": found.bytes_per_token if found else None,
        "tok_s_low": found.low if found else None,
        "tok_s_high": found.high if found else None,
        "compute_s": found.compute_s if found else None,
        "read_s": found.read_s if found else None,
        "manage_s": found.manage_s if found else None,
        "processor": dataclasses.asdict(measured.processor) if measured else None,
        "overhead": dataclasses.asdict(measured.overhead) if measured else None,
        "drive": {**dataclasses.asdict(drive), "bytes_per_s": measured.costs.bandwidth} if measured and drive else None,
        "advice": [dataclasses.asdict(advice) for advice in fit.advice],
        "measured": _measured(fit, cost) if cost else None,
    }


def _measured(fit: Fit, cost: DecodeCost) -> dict[str, Any]:
    share = _share(fit, cost)
    again = fit.at(_hits(cost), share)
    return {
        "tok_s": cost.decodes / cost.decode_s,
        "hit_rate": _hits(cost) if cost.lookups else None,
        "bytes_per_token": None if cost.read_bytes is None else _read(cost),
        "tokens": cost.decodes,
        "processor_share": share,
        "predicted_for_this": {"tok_s_low": again.low, "tok_s_high": again.high},
    }
