"""What a prefetcher is worth by how often it is right: the wait per token with the read-ahead lane, against none.

    python benchmarks/read_ahead.py [--quick] [--json] [--plot FILE] [--threads N] [--accuracy P ...]

The prefetcher here knows the routing, since the same tokens were decoded before, and suggests each layer's experts when
the layer before it is routed; of its suggestions the share ``accuracy`` is true and the rest is drawn at random. So the
figures say what a real one can reach, and that a bad one does no harm. Both sides have a cache of the same size, filled
by prompts and by other tokens, and decode the same tokens in turn, in processes of their own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from device import facts_of
from models import model_file, parser_of
from pairs import compare, quartiles
from report import Bar, Plot, publish
from worker import Worker, plan_of, random_tokens, serve

from bmoe import expert_key
from bmoe.contracts import ExpertKey, Facts, Options, RoutingEvent
from bmoe.plan import Plan

PROMPT, FILL = 8, 256


class Told:
    """A prefetcher that notes the routing of a run of tokens, and foresees it when they come again."""

    wants = frozenset({"topk"})

    def __init__(self, facts: Facts) -> None:
        self._experts = facts.model.banks[0].n_expert
        self._known: dict[int, list[list[ExpertKey]]] = {}
        self._run, self._at, self._accuracy = -1, 0, 0.0
        self._draw = random.Random(0)

    def begin(self, wanted: dict[str, Any]) -> None:
        """The prompt of a run was decoded: its tokens come next."""
        self._run, self._at, self._accuracy = wanted.get("run", -1), 0, wanted.get("accuracy", -1.0)
        self._draw.seed(self._run)
        if self._accuracy < 0:
            self._known[self._run] = []

    def observe(self, event: RoutingEvent, /) -> None:
        """Learn, or count on."""
        self._at += 1
        if self._accuracy < 0 and len(event.batch.positions) == 1:
            self._known[self._run].append([expert_key(event.layer, e) for e in event.ids[0].tolist()])

    def suggest(self, layer: int, /) -> Sequence[ExpertKey]:
        """What the next layer will use, or another of its experts in place of each."""
        known = self._known.get(self._run, [])
        if self._accuracy < 0 or self._at >= len(known):
            return ()
        wrong = self._draw.random
        return [k if wrong() < self._accuracy else self._other(k, known[self._at]) for k in known[self._at]]

    def _other(self, key: ExpertKey, used: Sequence[ExpertKey]) -> ExpertKey:
        base = key & ~0xFFFF
        return base + self._draw.choice([e for e in range(self._experts) if base + e not in used])


def told(plan: Plan) -> tuple[Plan, Told]:
    """``plan`` with this prefetcher in place of the one that it names."""
    prefetcher = Told(plan.facts_for_build())
    assert plan.prefetch is not None

    def build(options: Options, facts: Facts) -> Any:
        return prefetcher

    provider = replace(plan.prefetch.provider, build=build)
    return replace(plan, prefetch=replace(plan.prefetch, provider=provider)), prefetcher


def measure(model: str, share: float, accuracies: Sequence[float], arguments: Any, settings: Sequence[str]) -> Any:
    """One cache size: a run of tokens with none and then with each accuracy, in another order every time."""
    facts = facts_of(model)
    budget = f"cache.budget_mb={facts.expert_bytes * share / 2**20}"
    names = ["none", *(f"{accuracy:.0%}" for accuracy in accuracies)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    threads, pairs, tokens = arguments.threads, arguments.pairs, arguments.tokens
    with (
        Worker(model, budget, *settings, threads=threads) as plain,
        Worker(model, budget, 'prefetch.policy="temporal"', *settings, threads=threads, program=__file__) as ahead,
    ):
        n_vocab = plain.opened["n_vocab"]
        prompt = random_tokens(PROMPT, n_vocab)
        runs = [random_tokens(tokens, n_vocab, first=1000 * (turn + 1)) for turn in range(pairs)]
        for worker in (plain, ahead):
            for first in (1, 2, 3):
                worker.prefill(random_tokens(FILL, n_vocab, first=10**6 * first))
            for index, run in enumerate(runs):
                worker.decode(prompt, run, run=index)
        for index, run in enumerate(runs):
            order = names[index % len(names) :] + names[: index % len(names)]
            for turn, name in enumerate(order):
                other = random_tokens(tokens, n_vocab, first=10**7 + 1000 * (len(names) * index + turn))
                worker = plain if name == "none" else ahead
                worker.decode(prompt, other, run=len(runs))  # or the run before would have left all in the cache
                more = {} if name == "none" else {"run": index, "accuracy": accuracies[names.index(name) - 1]}
                found[name].append(worker.decode(prompt, run, **more))
    base = found["none"]
    rows = []
    for name in names:
        costs = found[name]
        rows.append(
            {
                "prefetcher": name,
                "wait_ms": [v * 1e3 for v in quartiles([c["wait_s"] / tokens for c in costs])],
                "token_ms": [v * 1e3 for v in quartiles([c["decode_s"] / tokens for c in costs])],
                "gain": compare([c["decode_s"] for c in base], [c["decode_s"] for c in costs]).as_dict(),
                "hit_rate": quartiles([c["hit_rate"] for c in costs])[1],
                "demand_mib": quartiles([c["bytes"] / tokens / 2**20 for c in costs])[1],
                "ahead_mib": quartiles([c["ahead_bytes"] / tokens / 2**20 for c in costs])[1],
                "wasted_mib": quartiles([c["wasted_bytes"] / tokens / 2**20 for c in costs])[1],
            }
        )
    return {"share": share, "rows": rows}


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, tokens=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of both sides")
    parser.add_argument("--share", type=float, nargs="+", default=[0.5, 0.25], help="of the experts in the cache")
    parser.add_argument("--accuracy", type=float, nargs="+", default=[1.0, 0.5, 0.0], help="of the suggestions")
    arguments = parser.parse_args()
    arguments.pairs = arguments.pairs or (4 if arguments.quick else 8)
    model = arguments.model or model_file(8 if arguments.quick else 24, arguments.folder)
    cells = [measure(model, share, arguments.accuracy, arguments, arguments.set) for share in arguments.share]
    result = {
        "benchmark": "read_ahead",
        "threads": arguments.threads,
        "set": arguments.set,
        "pairs": arguments.pairs,
        "model": model,
        "cells": cells,
    }
    lines, bars = [], []
    for cell in cells:
        for row in cell["rows"]:
            right = "no prefetcher" if row["prefetcher"] == "none" else f"{row['prefetcher']} right"
            name = f"cache {cell['share']:.0%}, {right}"
            bars.append(Bar(name, *row["wait_ms"]))
            lines.append(
                f"{name}: waiting {row['wait_ms'][1]:.1f} ms a token of {row['token_ms'][1]:.1f}; "
                f"{row['hit_rate']:.0%} hits, MiB a token: {row['demand_mib']:.1f} needed, "
                f"{row['ahead_mib']:.1f} ahead, {row['wasted_mib']:.1f} wasted; "
                f"time without / with {row['gain']['ratio']:.3f} ({row['gain']['low']:.3f}-{row['gain']['high']:.3f})"
            )
    title = "Waiting for reads by how often the prefetcher is right"
    publish(result, arguments, lines, Plot(title, "ms a token", bars))


def _serve(model: str, overrides: list[str]) -> None:
    plan, prefetcher = told(plan_of(model, overrides))
    serve(plan, prefetcher.begin)


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1].endswith(".gguf") and "=" in sys.argv[2]:
        _serve(sys.argv[1], sys.argv[2:])  # as worker.py is called
    else:
        main()
