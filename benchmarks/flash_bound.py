"""Time per token when every expert comes from storage, against what the device and the processor allow.

    python benchmarks/flash_bound.py [--quick] [--json] [--plot FILE] [--against SCRIPT]

Three things are measured in turn, on the same file: decoding with the cache off; the device, by
reading slices of the same size at random places through the same fetcher in batches of one layer; and decoding with
all experts resident, which is the compute. ``flash_ratio`` = time per token / (bytes / bandwidth); ``bound_ratio`` =
time per token / max(bytes / bandwidth, compute); ``serial_ratio`` = time per token / (bytes / bandwidth + compute), the
bound of an engine that reads and computes in turn.

``--against SCRIPT`` alternates with another engine's script on the same file, cache off and at 80 % hits, and prints
the ratio of tokens per second. The script is called as ``SCRIPT MODEL --cache MiB -n N --rand --prompt TEXT``, with
SLOTS=1 or RECYCLE=1 set, and must print ``tok/s X`` and ``hit Y``; a ``seam3.c`` beside it is compiled first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from device import bandwidth, facts_of
from models import model_file, parser_of
from pairs import Ratio, interleave, quartiles
from report import Bar, Plot, publish
from worker import Worker, random_tokens


def flash_bound(model: str, pairs: int, tokens: int, threads: int) -> dict[str, Any]:
    """Alternate streaming, the device and the compute."""
    facts = facts_of(model)
    times, rates, computes, flash, serial, bound = [], [], [], [], [], []
    everything = f"cache.budget_mb={1 << 20}"
    with (
        Worker(model, "cache.budget_mb=0", threads=threads) as off,
        Worker(model, everything, threads=threads) as resident,
    ):
        n_vocab = off.opened["n_vocab"]
        prompt = random_tokens(8, n_vocab)
        resident.decode(prompt, random_tokens(tokens, n_vocab))
        for index in range(pairs):
            # other tokens every time: what was read once may come from a cache that lies below this system
            given = random_tokens(tokens, n_vocab, first=1000 * (index + 1))
            rate = bandwidth(facts, "aio", 1 << 30)
            cost = off.decode(prompt, given)
            rate = (rate + bandwidth(facts, "aio", 1 << 30)) / 2
            compute = resident.decode(prompt, random_tokens(tokens, n_vocab))["decode_s"] / tokens
            token_s, ideal = cost["decode_s"] / tokens, cost["bytes"] / tokens / rate
            times.append(token_s)
            rates.append(rate)
            computes.append(compute)
            flash.append(token_s / ideal)
            serial.append(token_s / (ideal + compute))
            bound.append(token_s / max(ideal, compute))
        peak = cost["peak_rss_bytes"]
    return {
        "benchmark": "flash_bound",
        "flash_ratio": quartiles(flash)[1],
        "flash_ratio_quartiles": quartiles(flash),
        "bound_ratio": quartiles(bound)[1],
        "bound_ratio_quartiles": quartiles(bound),
        "serial_ratio": quartiles(serial)[1],
        "serial_ratio_quartiles": quartiles(serial),
        "token_ms": [v * 1e3 for v in quartiles(times)],
        "compute_ms": [v * 1e3 for v in quartiles(computes)],
        "bandwidth_gb_s": [v / 1e9 for v in quartiles(rates)],
        "mib_per_token": cost["bytes"] / tokens / 2**20,
        "peak_rss_bytes": peak,
        "pairs": pairs,
        "threads": threads,
        "model": model,
    }


def against(script: Path, model: str, pairs: int, tokens: int, cell: str) -> dict[str, Any]:
    """Alternate with another engine, with the cache off, at 80 % hits, or in both cells."""
    with tempfile.TemporaryDirectory() as folder:
        if (source := script.parent / "seam3.c").exists():
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", f"{folder}/seam3.so"], check=True)
        wanted = [("cache off", 0, "SLOTS")] if cell != "cached" else []
        if cell != "off":
            budget = budget_for(model, tokens, 0.80)
            wanted.append((f"cache {budget} MiB", budget, "RECYCLE"))
        cells: dict[str, Any] = {}
        for name, mib, environment in wanted:
            hits: dict[str, float] = {}

            def ours(mib: int = mib, hits: dict[str, float] = hits) -> float:
                with Worker(model, f"cache.budget_mb={mib}") as worker:
                    n_vocab = worker.opened["n_vocab"]
                    cost = worker.decode(PROMPT, random_tokens(tokens, n_vocab))
                hits["ours"] = cost["hit_rate"]
                return float(cost["tok_s"])

            def theirs(mib: int = mib, flag: str = environment, hits: dict[str, float] = hits) -> float:
                command = [sys.executable, str(script), model, "--cache", str(mib), "-n", str(tokens), "--rand"]
                command += ["--prompt", PROMPT]
                done = subprocess.run(
                    command, cwd=folder, env={**os.environ, flag: "1"}, capture_output=True, text=True, check=True
                )
                hits["theirs"] = _figure("hit", done.stdout)
                return _figure("tok/s", done.stdout)

            ratio: Ratio = interleave(ours, theirs, pairs)
            cells[name] = {**ratio.as_dict(), "hit_rate": hits}
            print(f"{name}: tokens per second, ours / theirs: {ratio}; hits {hits}", file=sys.stderr, flush=True)
    return {"benchmark": "against", "script": script.name, "model": model, "cells": cells}


PROMPT = "The quick brown fox jumps over the lazy dog."
"""Decoded by both engines first, so that their caches start alike."""


def budget_for(model: str, tokens: int, wanted: float) -> int:
    """The budget in MiB at which the given tokens hit to ``wanted`` +- 0.02."""
    low, high = 0, facts_of(model).expert_bytes >> 20
    while True:
        middle = (low + high) // 2
        with Worker(model, f"cache.budget_mb={middle}") as worker:
            n_vocab = worker.opened["n_vocab"]
            rate = worker.decode(PROMPT, random_tokens(tokens, n_vocab))["hit_rate"]
        if abs(rate - wanted) <= 0.015 or high - low < 16:
            return middle
        low, high = (middle, high) if rate < wanted else (low, middle)


def _figure(label: str, text: str) -> float:
    found = re.search(rf"{re.escape(label)} ([0-9.]+)", text)
    if found is None:
        raise SystemExit(f"no {label!r} in: {text!r}")
    return float(found[1])


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, tokens=24)
    parser.add_argument("--against", type=Path, metavar="SCRIPT", help="another engine to alternate with")
    parser.add_argument("--cell", choices=["off", "cached", "both"], default="both", help="with --against: what to run")
    arguments = parser.parse_args()
    if not shutil.which("cc") and arguments.against:
        raise SystemExit("--against compiles a filter: install a C compiler")
    model = arguments.model or model_file(8 if arguments.quick else 24, arguments.folder)
    pairs = arguments.pairs or (3 if arguments.quick else 7)
    if arguments.against:
        result = against(arguments.against.resolve(), model, pairs, arguments.tokens, arguments.cell)
        bars = [Bar(name, cell["low"], cell["ratio"], cell["high"]) for name, cell in result["cells"].items()]
        publish(result, arguments, [], Plot("Tokens per second against another engine", "ours / theirs", bars))
        return
    result = flash_bound(model, pairs, arguments.tokens, arguments.threads)
    lines = [
        f"time per token / (bytes / bandwidth):              {result['flash_ratio']:.3f}",
        f"time per token / max(bytes / bandwidth, compute):  {result['bound_ratio']:.3f}",
        f"time per token / (bytes / bandwidth + compute):    {result['serial_ratio']:.3f}",
        f"  {result['token_ms'][1]:.0f} ms a token, {result['mib_per_token']:.0f} MiB at "
        f"{result['bandwidth_gb_s'][1]:.2f} GB/s, compute {result['compute_ms'][1]:.0f} ms (medians)",
    ]
    bars = [
        Bar("max(bytes / bandwidth, compute)", *result["bound_ratio_quartiles"]),
        Bar("bytes / bandwidth + compute", *result["serial_ratio_quartiles"]),
    ]
    publish(result, arguments, lines, Plot("Cache off: time per token against a bound", "ratio", bars, 1.05))


if __name__ == "__main__":
    main()
