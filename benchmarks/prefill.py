"""How fast a prompt streams through the layers, against the device's sequential direct reads.

    python benchmarks/prefill.py [--quick] [--json] [--plot FILE] [--prompt N]

A prompt that is decoded in one go needs nearly every expert of every layer, once. With ``stream.overlap`` on, the next
layer is read while this one is computed; off, each layer is read after it was routed. Both take turns, with the cache
off and with a cache of half the experts, on the same tokens; the device is measured between them, by the same fetcher
in file order. ``bandwidth_ratio`` = bytes read / time of the whole prompt / that bandwidth, to be at least 0.95 where
reading takes longer than computing (``compute_s``, of the same prompt with every expert resident).
"""

from __future__ import annotations

from typing import Any

from device import facts_of, sequential
from models import model_file, parser_of
from pairs import interleave, quartiles
from report import Bar, Plot, publish
from worker import Worker, random_tokens

MODES = ("projection", "off")


def cell(model: str, budget_mb: float, prompt: int, rounds: int, threads: int) -> dict[str, Any]:
    """Alternate the two modes and the device."""
    facts = facts_of(model)
    common = (f"cache.budget_mb={budget_mb}", f"model.ubatch={prompt}")
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    ratios: dict[str, list[float]] = {mode: [] for mode in MODES}
    rates: list[float] = []
    nbytes: dict[str, int] = {}
    with (
        Worker(model, *common, "stream.overlap=projection", threads=threads) as piped,
        Worker(model, *common, "stream.overlap=off", threads=threads) as serial,
    ):
        workers = dict(zip(MODES, (piped, serial), strict=True))
        turn = iter(range(10**6))

        def run(mode: str) -> float:
            tokens = random_tokens(prompt, piped.opened["n_vocab"], first=1000 * (next(turn) // 2))
            before = sequential(facts, "aio", 1 << 29)
            cost = workers[mode].prefill(tokens)
            rate = (before + sequential(facts, "aio", 1 << 29)) / 2
            rates.append(rate)
            nbytes[mode] = cost["bytes"]
            seconds[mode].append(cost["decode_s"])
            ratios[mode].append(cost["bytes"] / cost["decode_s"] / rate)
            return float(cost["decode_s"])

        for mode in MODES:  # fills the cache and takes its memory from the system
            workers[mode].prefill(random_tokens(prompt, piped.opened["n_vocab"]))
        gain = interleave(lambda: run("off"), lambda: run("projection"), rounds)
    return {
        "budget_mb": budget_mb,
        "gain": gain.as_dict(),
        "seconds": {mode: quartiles(found) for mode, found in seconds.items()},
        "bandwidth_ratio": {mode: quartiles(found) for mode, found in ratios.items()},
        "bandwidth_gb_s": [rate / 1e9 for rate in quartiles(rates)],
        "bytes": nbytes,
    }


def compute(model: str, prompt: int, threads: int) -> float:
    """Seconds of the prompt with every expert resident."""
    with Worker(model, f"cache.budget_mb={1 << 20}", f"model.ubatch={prompt}", threads=threads) as resident:
        tokens = random_tokens(prompt, resident.opened["n_vocab"])
        return min(float(resident.prefill(tokens)["decode_s"]) for _ in range(3))


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, tokens=0)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt, computed at a time (64)")
    arguments = parser.parse_args()
    model = arguments.model or model_file(8 if arguments.quick else 24, arguments.folder)
    rounds = arguments.pairs or (3 if arguments.quick else 7)
    half = facts_of(model).expert_bytes / 2 / 2**20
    cells = [cell(model, mib, arguments.prompt, rounds, arguments.threads) for mib in (0, half)]
    result = {
        "benchmark": "prefill",
        "prompt": arguments.prompt,
        "compute_s": compute(model, arguments.prompt, arguments.threads),
        "threads": arguments.threads,
        "pairs": rounds,
        "model": model,
        "cells": cells,
    }
    lines = [f"{arguments.prompt} tokens; computing alone takes {result['compute_s']:.2f} s"]
    bars = []
    for found in cells:
        name = f"cache {found['budget_mb']:.0f} MiB" if found["budget_mb"] else "cache off"
        lines.append(f"{name}: without / with the next layer read ahead {found['gain']['ratio']:.3f}")
        for mode in MODES:
            low, middle, high = found["bandwidth_ratio"][mode]
            bars.append(Bar(f"{name}, overlap {mode}", low, middle, high))
            lines.append(
                f"  overlap {mode}: {found['seconds'][mode][1]:.2f} s, {found['bytes'][mode] / 1e9:.2f} GB, "
                f"{middle:.3f} of the sequential bandwidth"
            )
    plot = Plot("Prompt: bytes read / time", "share of the device's sequential direct-read bandwidth", bars, 0.95)
    publish(result, arguments, lines, plot)


if __name__ == "__main__":
    main()
