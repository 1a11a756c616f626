"""Decoding with half of the experts cached, and with none, against what device and processor allow.

    python benchmarks/half_cache.py [--quick] [--json] [--plot FILE] [--threads N]

For the cache off and for a cache of half the experts, decoding with ``stream.overlap`` "off" and "projection" is
alternated on the same file and the same tokens. ``gain`` = time without / time with. ``bound_ratio`` = time per token
with overlap / max(bytes / bandwidth, compute), where the bandwidth is measured between the runs by the same fetcher,
and the compute is a decode with every expert resident. The caches are filled by prompts before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from device import bandwidth, facts_of
from models import model_file, parser_of
from pairs import interleave, quartiles
from report import Bar, Plot, publish
from worker import Worker, random_tokens

PROMPT, FILL = 8, 256


def measure(
    model: str, budget_mb: float, pairs: int, tokens: int, threads: int, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """One cell: alternate the two modes, the device and the compute."""
    facts = facts_of(model)
    budget = f"cache.budget_mb={budget_mb}"
    bounds: dict[str, list[float]] = {"off": [], "projection": []}
    io: list[float] = []
    computes: list[float] = []
    waits: dict[str, list[float]] = {"off": [], "projection": []}
    costs: dict[str, list[float]] = {"off": [], "projection": []}
    hits: list[float] = []
    with (
        Worker(model, budget, "stream.overlap=off", *settings, threads=threads) as serial,
        Worker(model, budget, "stream.overlap=projection", *settings, threads=threads) as overlapped,
        Worker(model, f"cache.budget_mb={1 << 20}", threads=threads) as resident,
    ):
        n_vocab = serial.opened["n_vocab"]
        prompt = random_tokens(PROMPT, n_vocab)
        for worker in (serial, overlapped, resident):  # memory that the system has to find first would be measured too
            for first in (1, 2, 3):
                worker.prefill(random_tokens(FILL, n_vocab, first=10**6 * first))
            worker.decode(prompt, random_tokens(tokens, n_vocab))
        turn = iter(range(1, 10**6))

        def run(worker: Worker, mode: str, first: int) -> float:
            cost = worker.decode(prompt, random_tokens(tokens, n_vocab, first=first))
            waits[mode].append(cost["wait_s"] / tokens)
            costs[mode].append(cost["decode_s"] / tokens)
            reading = cost["bytes"] / tokens / bandwidth(facts, "aio", 1 << 29)
            compute = resident.decode(prompt, random_tokens(tokens, n_vocab))["decode_s"] / tokens
            bounds[mode].append(cost["decode_s"] / tokens / max(reading, compute))
            io.append(reading)
            computes.append(compute)
            hits.append(cost["hit_rate"])
            return float(cost["decode_s"])

        def without() -> float:
            return run(serial, "off", 1000 * next(turn))

        def with_() -> float:
            return run(overlapped, "projection", 1000 * next(turn))

        gain = interleave(without, with_, pairs)
    return {
        "budget_mb": budget_mb,
        "gain": gain.as_dict(),
        "bound_ratio": {mode: quartiles(found) for mode, found in bounds.items()},
        "read_ms": [v * 1e3 for v in quartiles(io)],
        "compute_ms": [v * 1e3 for v in quartiles(computes)],
        "hit_rate": quartiles(hits)[1],
        "token_ms": {mode: [v * 1e3 for v in quartiles(found)] for mode, found in costs.items()},
        "read_wait_ms": {mode: [v * 1e3 for v in quartiles(found)] for mode, found in waits.items()},
    }


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, tokens=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of both modes")
    arguments = parser.parse_args()
    model = arguments.model or model_file(8 if arguments.quick else 24, arguments.folder)
    pairs = arguments.pairs or (3 if arguments.quick else 7)
    half = (facts_of(model).expert_bytes / 2) / 2**20
    cells = [measure(model, budget, pairs, arguments.tokens, arguments.threads, arguments.set) for budget in (0, half)]
    result = {
        "benchmark": "half_cache",
        "threads": arguments.threads,
        "set": arguments.set,
        "pairs": pairs,
        "model": model,
        "cells": cells,
    }
    lines, bars = [], []
    for cell in cells:
        ms, wait = cell["token_ms"], cell["read_wait_ms"]
        name = f"cache {cell['budget_mb']:.0f} MiB" if cell["budget_mb"] else "cache off"
        lines.append(f"{name}, {cell['hit_rate']:.0%} hits: without / with overlap {cell['gain']['ratio']:.3f}")
        for mode, bound in cell["bound_ratio"].items():
            bars.append(Bar(f"{name}, overlap {mode}", *bound))
            lines.append(
                f"  overlap {mode}: {ms[mode][1]:.1f} ms a token, waiting {wait[mode][1]:.1f}; "
                f"{bound[1]:.3f} of max(reading {cell['read_ms'][1]:.1f}, computing {cell['compute_ms'][1]:.1f} ms)"
            )
    plot = Plot(
        "Time per token against the larger of reading and computing", "ratio (1 = one hides the other)", bars, 1.1
    )
    publish(result, arguments, lines, plot)


if __name__ == "__main__":
    main()
