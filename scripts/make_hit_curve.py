"""Make core/fit/hit_curve.json: hit rates by policy, experts, experts per token and budget, from routing traces.

Each trace (route_trace v1) is replayed exactly, its prefill first and uncounted. Fewer experts per token than were
recorded are had by keeping the first slots of every routing, which are the router's best; more cannot be had.

Example: .venv/bin/python scripts/make_hit_curve.py --trace qwen.route.csv --trace gemma.route.csv --out curve.json
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bmoe.contracts import CacheFacts, Facts, FetchFacts, ModelFacts, expert_key
from bmoe.plugins import load_all
from bmoe.registry import load_registry
from bmoe.replay import Trace, replay
from bmoe.replay.route_trace import DECODE, PREFILL, RouteTrace, read_trace

LRU = "lru"
SHARES = (
    0.01,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.125,
    0.15,
    0.2,
    0.25,
    0.3,
    0.35,
    0.4,
    0.45,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
)
"""Budgets, as shares of all experts of the model."""


def decode_hits(prefill: Trace, decode: Trace, used: int, capacity: int) -> float:
    """LRU's hits over lookups in ``decode`` after ``prefill``, with the first ``used`` experts of every routing.

    The rules are those of :func:`decode_hits_of` without a policy plugin between, which is ten times as fast.
    """
    resident: OrderedDict[int, None] = OrderedDict()
    hits = lookups = 0
    for trace, counts in ((prefill, False), (decode, True)):
        for step in trace:
            for layer, experts in step:
                keys = [expert_key(layer, expert) for expert in experts[:used]]
                missing = [key for key in keys if key not in resident]
                if counts:
                    lookups += len(keys)
                    hits += len(keys) - len(missing)
                for key in keys:
                    resident[key] = None
                    resident.move_to_end(key)
                while len(resident) > max(capacity, len(keys)):
                    resident.popitem(last=False)
    return hits / lookups


def decode_hits_of(policy: str, prefill: Trace, decode: Trace, used: int, capacity: int) -> float:
    """The same of any cache policy, with its default options."""
    provider = load_all(load_registry()).providers["cache"][policy]
    none = ModelFacts("", "", "", (), 0, 0, 0, 0, 0, 0, 0, (), ())
    facts = Facts(none, CacheFacts(0, capacity, 0), FetchFacts((), 1, False, 1))
    first, second = (
        [[(layer, experts[:used]) for layer, experts in step] for step in trace] for trace in (prefill, decode)
    )
    # a replay is the same up to where another ends
    before = replay(provider.build(provider.options(), facts), first, capacity)
    both = replay(provider.build(provider.options(), facts), [*first, *second], capacity)
    return (both.hits - before.hits) / (both.lookups - before.lookups)


def curves(name: str, trace: RouteTrace, models: Sequence[str], policy: str) -> list[dict[str, Any]]:
    """One curve per number of experts used: hit rates at :data:`SHARES`, never falling."""
    prefill, decode = trace.steps(PREFILL), trace.steps(DECODE)
    layers = {layer for step in decode for layer, _ in step}
    found = []
    for used in [trace.n_used] if models else range(1, trace.n_used + 1):
        rates: list[float] = []
        for share in SHARES:
            capacity = int(share * len(layers) * trace.n_expert)
            if policy == LRU:
                rate = decode_hits(prefill, decode, used, capacity)
            else:
                rate = decode_hits_of(policy, prefill, decode, used, capacity)
            rates.append(round(max([rate, *rates[-1:]]), 4))
        row = {"policy": policy, "trace": name, "experts": trace.n_expert, "used": used, "models": list(models)}
        found.append({**row, "hit_rates": rates})
    return found


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", default=[], help="a trace that stands for models of any name")
    parser.add_argument("--own", action="append", default=[], help="MODEL=FILE: one that stands for this model only")
    parser.add_argument("--policies", default=f"{LRU},next-use", help="cache policies, by commas")
    parser.add_argument("--note", default="", help="where the traces are from, and their licence")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    given = [(path, ()) for path in args.trace] + [(p, (m,)) for m, _, p in (own.partition("=") for own in args.own)]
    rows = [
        row
        for policy in args.policies.split(",")
        for path, models in given
        for row in curves(Path(path).name.split(".")[0], read_trace(path), models, policy)
    ]
    head = json.dumps({"schema": 2, "note": args.note, "shares": SHARES}).removesuffix("}")
    body = ",\n".join(json.dumps(row) for row in rows)
    Path(args.out).write_text(f'{head}, "curves": [\n{body}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
