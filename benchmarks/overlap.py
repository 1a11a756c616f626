"""What it is worth to compute a projection while those after it are still being read.

    python benchmarks/overlap.py [--quick] [--json] [--threads N]

For the cache off and for a cache of half the experts, decoding with ``stream.overlap`` "off" and "projection" is
alternated on the same file and the same tokens. ``gain`` = time without / time with. ``bound_ratio`` = time per token
with overlap / max(bytes / bandwidth, compute), where the bandwidth is measured between the runs by the same fetcher,
and the compute is a decode with every expert resident.
"""

from __future__ import annotations

import json
from typing import Any

from flash_bound import bandwidth, facts_of
from models import model_file, parser_of
from pairs import interleave, quartiles
from worker import Worker, random_tokens

PROMPT = 8


def measure(model: str, budget_mb: float, pairs: int, tokens: int, threads: int) -> dict[str, Any]:
    """One cell: alternate the two modes, the device and the compute."""
    facts = facts_of(model)
    budget = f"cache.budget_mb={budget_mb}"
    bounds: list[float] = []
    waits: dict[str, list[float]] = {"off": [], "projection": []}
    costs: dict[str, list[float]] = {"off": [], "projection": []}
    with (
        Worker(model, budget, "stream.overlap=off", threads=threads) as serial,
        Worker(model, budget, "stream.overlap=projection", threads=threads) as overlapped,
        Worker(model, f"cache.budget_mb={1 << 20}", threads=threads) as resident,
    ):
        n_vocab = serial.opened["n_vocab"]
        prompt = random_tokens(PROMPT, n_vocab)
        resident.decode(prompt, random_tokens(tokens, n_vocab))
        turn = iter(range(1, 10**6))

        def run(worker: Worker, mode: str, first: int) -> float:
            cost = worker.decode(prompt, random_tokens(tokens, n_vocab, first=first))
            waits[mode].append(cost["wait_s"] / tokens)
            costs[mode].append(cost["decode_s"] / tokens)
            if mode == "projection":
                rate = bandwidth(facts, "aio", 1 << 29)
                compute = resident.decode(prompt, random_tokens(tokens, n_vocab))["decode_s"] / tokens
                bounds.append(cost["decode_s"] / tokens / max(cost["bytes"] / tokens / rate, compute))
            return float(cost["decode_s"])

        def without() -> float:
            return run(serial, "off", 1000 * next(turn))

        def with_() -> float:
            return run(overlapped, "projection", 1000 * next(turn))

        gain = interleave(without, with_, pairs)
    return {
        "budget_mb": budget_mb,
        "gain": gain.as_dict(),
        "bound_ratio": quartiles(bounds),
        "token_ms": {mode: [v * 1e3 for v in quartiles(found)] for mode, found in costs.items()},
        "read_wait_ms": {mode: [v * 1e3 for v in quartiles(found)] for mode, found in waits.items()},
    }


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, tokens=16)
    arguments = parser.parse_args()
    model = arguments.model or model_file(8 if arguments.quick else 24, arguments.folder)
    pairs = arguments.pairs or (3 if arguments.quick else 7)
    half = (facts_of(model).expert_bytes / 2) / 2**20
    cells = [measure(model, budget, pairs, arguments.tokens, arguments.threads) for budget in (0, half)]
    result = {"benchmark": "overlap", "threads": arguments.threads, "pairs": pairs, "model": model, "cells": cells}
    if arguments.json:
        print(json.dumps(result))
        return
    for cell in cells:
        ms, wait = cell["token_ms"], cell["read_wait_ms"]
        print(f"cache {cell['budget_mb']:.0f} MiB: without / with overlap {cell['gain']['ratio']:.3f}")
        print(f"  with overlap / max(bytes / bandwidth, compute): {cell['bound_ratio'][1]:.3f}")
        print(
            f"  {ms['off'][1]:.1f} and {ms['projection'][1]:.1f} ms a token, "
            f"waiting {wait['off'][1]:.1f} and {wait['projection'][1]:.1f} ms (medians)"
        )


if __name__ == "__main__":
    main()
