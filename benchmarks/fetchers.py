"""How long a layer's reads take by the depth of the queue and the size of the pieces, with each fetcher, interleaved.

A batch is read as the engine reads it: three stages, each waited for. Prints the median time until the first stage and
until the last, and the processor time of the thread that waits, per batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from device import facts_of

from bmoe import plugins
from bmoe.contracts import CacheFacts, Facts, Fetcher, FetchFacts, ModelFacts, ReadBatch
from bmoe.native import memory
from bmoe.registry import load_registry

CASES: tuple[tuple[str, dict[str, int]], ...] = (
    ("aio", {"depth": 4}),
    ("aio", {"depth": 8}),
    ("aio", {"depth": 8, "piece_kb": 256}),
    ("aio", {"depth": 16}),
    ("aio", {"depth": 16, "piece_kb": 256}),
    ("uring", {"depth": 8}),
    ("uring", {"depth": 8, "piece_kb": 256}),
    ("uring", {"depth": 16}),
    ("pread", {}),
)
STAGES = 3


class Bench:
    """Huge pages to read into, and random places to read from."""

    def __init__(self, facts: ModelFacts, most: int) -> None:
        self.facts = facts
        self.stride = memory.round_up(max(p.stride for p in facts.banks[0].projections))
        self.region = memory.reserve(self.stride * most, huge=True)
        memory.fill(self.region.address, 0, self.region.nbytes)
        self._draw = np.random.default_rng()

    def batch(self, reads: int) -> ReadBatch:
        """``reads`` slices at random places, in equal parts of the stages."""
        index = np.arange(reads, dtype=np.int64)
        length = np.full(reads, self.stride, dtype=np.int64)
        places = self._draw.integers(0, (self.facts.shards[0].nbytes - self.stride) // memory.PAGE, reads)
        address = self.region.address + index * self.stride
        return ReadBatch(address, length, length, places * memory.PAGE, index * 0, index * STAGES // reads)

    def once(self, fetcher: Fetcher, reads: int) -> tuple[float, float, float]:
        """Seconds to the first stage, to the last, and of the processor."""
        batch = self.batch(reads)
        cpu, began = time.thread_time(), time.perf_counter()
        ticket = fetcher.submit(batch)
        fetcher.wait(ticket, 0)
        first = time.perf_counter() - began
        for stage in range(1, STAGES):
            fetcher.wait(ticket, stage)
        return first, time.perf_counter() - began, time.thread_time() - cpu


def measure(model: str, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """One row per case and number of reads."""
    facts = facts_of(model)
    catalog = plugins.load_all(load_registry())
    bench = Bench(facts, max(sizes))
    given = Facts(facts, CacheFacts(0, 0, 0), FetchFacts((facts.shards[0].path,), 4, True, 384))
    cases = [(name, options) for name, options in CASES if not catalog.providers["fetch"][name].available()]
    built = [catalog.providers["fetch"][name] for name, _ in cases]
    fetchers = [p.build(p.options(**options), given) for p, (_, options) in zip(built, cases, strict=True)]
    rows = []
    for reads in sizes:
        taken: list[list[tuple[float, float, float]]] = [[] for _ in cases]
        for _ in range(rounds):
            for fetcher, each in zip(fetchers, taken, strict=True):
                each.append(bench.once(fetcher, reads))
        for (name, options), each in zip(cases, taken, strict=True):
            first, last, cpu = (statistics.median(column) for column in zip(*each, strict=True))
            row = {"reads": reads, "fetcher": name, "options": options, "first_ms": first * 1e3, "last_ms": last * 1e3}
            rows.append({**row, "gb_s": reads * bench.stride / last / 1e9, "cpu_us": cpu * 1e6})
    for fetcher in fetchers:
        fetcher.close()
    bench.region.close()
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model with routed experts, larger than any cache below")
    parser.add_argument("--reads", type=int, nargs="+", default=[3, 6, 24], help="slices per batch (3 6 24)")
    parser.add_argument("--rounds", type=int, default=40, help="batches per case (40)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows = measure(arguments.model, arguments.reads, arguments.rounds)
    if arguments.json:
        print(json.dumps({"benchmark": "fetchers", "model": arguments.model, "rows": rows}))
        return
    print("reads  fetcher                          first ms  last ms   GB/s  CPU us")
    for row in rows:
        shown = " ".join([row["fetcher"], *(f"{key}={value}" for key, value in row["options"].items())])
        times = f"{row['first_ms']:8.2f} {row['last_ms']:8.2f} {row['gb_s']:6.2f} {row['cpu_us']:7.0f}"
        print(f"{row['reads']:5}  {shown:32} {times}")


if __name__ == "__main__":
    main()
