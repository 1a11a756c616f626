"""How long a replay takes: a made routing trace of ten million look-ups, read from a file and replayed under LRU.

    python benchmarks/replay.py [--lookups N] [--policies lru,belady,generic] [--json] [--plot FILE]

The model is a made-up one with 48 layers, 128 experts and top-8; each slot keeps its expert with a chance of 0.5. The
cache holds a quarter of the experts. "generic" is LRU through the calls that every other policy is replayed by, which
must count the same hits. Time is of one process; nothing is spread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from report import Bar, Plot, publish

from bmoe.replay.contender import Contender
from bmoe.replay.furthest import play_belady
from bmoe.replay.lookups import Lookups
from bmoe.replay.play import Played, play, play_lru
from bmoe.replay.read_lookups import read_lookups

LAYERS, EXPERTS, USED, ENTRY = 48, 128, 8, 2 << 20
BUDGET = LAYERS * EXPERTS * ENTRY // 4
TARGET_S = 60.0


def write_made_trace(path: Path, lookups: int, seed: int = 0) -> None:
    """A ``route_trace v1`` of at least ``lookups`` rows, all of decode."""
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.random((LAYERS, EXPERTS)), axis=1)
    head = [f"# layer={layer} expert_bytes={ENTRY} dense_bytes=0\n" for layer in range(LAYERS)]
    with path.open("w", encoding="ascii") as file:
        file.write(f"# route_trace v1\n# model=made arch=made n_layer={LAYERS} n_expert={EXPERTS} ")
        file.write(
            f"n_expert_used={USED}\n{''.join(head)}turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
        )
        for step in range(-(-lookups // (LAYERS * USED))):
            for slot in range(USED):  # a slot that changes trades places with an expert that is not in use
                layers = np.flatnonzero(rng.random(LAYERS) < 0.5)
                other = rng.integers(USED, EXPERTS, len(layers))
                order[layers, slot], order[layers, other] = order[layers, other], order[layers, slot]
            file.writelines(
                f"0,1,{step},{layer},{slot},{expert},0.125,0,{ENTRY}\n"
                for layer, experts in enumerate(order[:, :USED].tolist())
                for slot, expert in enumerate(experts)
            )


def generic(trace: Lookups, budget: int) -> Played:
    """LRU through the calls of any policy."""
    return play(Contender("lru", "lru").built(trace, budget), trace, budget)


PLAYERS: dict[str, Callable[[Lookups, int], Played]] = {"lru": play_lru, "belady": play_belady, "generic": generic}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lookups", type=int, default=10_000_000, help="rows of the trace")
    parser.add_argument("--policies", default="lru,generic,belady", help=f"of {', '.join(PLAYERS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures, as a .png or .svg file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bmoe-replay-") as folder:
        path = Path(folder) / "made.route.csv"
        write_made_trace(path, arguments.lookups)
        began = time.perf_counter()
        trace = read_lookups(path)
        read_s = time.perf_counter() - began
    figures: dict[str, Any] = {}
    for name in arguments.policies.split(","):
        began = time.perf_counter()
        played = PLAYERS[name](trace, BUDGET)
        seconds = time.perf_counter() - began
        figures[name] = {"s": seconds, "hit_rate": played.hit_rate, "hits": played.hits}
    if {"lru", "generic"} <= figures.keys() and figures["lru"]["hits"] != figures["generic"]["hits"]:
        raise SystemExit("the fast replay of LRU counts other hits than the generic one: no figure means anything")
    lines = [f"{len(trace.keys)} look-ups read in {read_s:.1f} s"]
    lines += [f"{name:8} {f['s']:6.1f} s  hit rate {100 * f['hit_rate']:.1f} %" for name, f in figures.items()]
    result = {"benchmark": "replay", "lookups": len(trace.keys), "read_s": read_s, "policies": figures}
    bars = [Bar(name, f["s"] + read_s, f["s"] + read_s, f["s"] + read_s) for name, f in figures.items()]
    plot = Plot(f"Replay of {len(trace.keys)} look-ups", "seconds, reading included", bars, TARGET_S)
    publish(result, arguments, lines, plot)


if __name__ == "__main__":
    main()
