"""What each prefetcher saves and costs on the reference model, token by token, against none with the same budget.

    python benchmarks/prefetchers.py [--budget-mb MIB,MIB] [--rounds N] [--tokens N] [--policy NAME] [--json]

All prefetchers and none are opened beside each other and decode the same held-out text in turn, another one each round,
in another order each time; the first round warms them and is not counted. Memory, cache and governor go on from round
to round, as in a long conversation. ``speed`` = time of none / time with, of the same round: above 1 is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

from pairs import quartiles
from shelf_measure import MODEL, open_with

from bmoe.bundled import find_model
from bmoe.conversation import Conversation

NAMES = ("none", "temporal", "stale-gate", "edgemoe", "hot")


def decode(conversation: Conversation, ids: list[int]) -> dict[str, float]:
    """One text, token by token: sums of what its tokens took and did."""
    conversation.clear()
    conversation.feed(ids[:1])
    sums = dict.fromkeys(("wait", "lookups", "hits", "needed", "ahead", "used", "wasted", "off"), 0.0)
    began = time.perf_counter()
    for token in ids[1:]:
        cost = conversation.feed([token], "decode")
        found = (cost.read_wait_s, cost.lookups, cost.hits, cost.read_bytes)
        guessed = (cost.ahead_bytes, cost.used_ahead_bytes, cost.wasted_bytes, cost.off)
        for name, value in zip(sums, (*found, *guessed), strict=True):
            sums[name] += value or 0
    return {"took": time.perf_counter() - began, **sums}


def measure(policy: str, budget_mb: float, texts: list[str], rounds: int, tokens: int) -> list[dict[str, Any]]:
    """A row per prefetcher, with medians over rounds and the quartiles of its speed."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    with contextlib.ExitStack() as stack:
        talks: dict[str, Conversation] = {}
        for name in NAMES:
            tables = {"cache": {"policy": policy}, **({} if name == "none" else {"prefetch": {"policy": name}})}
            engine = stack.enter_context(open_with(tables, budget_mb))
            talks[name] = stack.enter_context(engine.conversation())
            ids = engine.model.tokenize("\n".join(texts))
        if len(ids) < (rounds + 1) * (tokens + 1):
            raise SystemExit(f"--rounds {rounds} --tokens {tokens}: the held-out texts are too short; ask for fewer")
        for index in range(rounds + 1):
            part = ids[index * (tokens + 1) : (index + 1) * (tokens + 1)]
            order = NAMES[index % len(NAMES) :] + NAMES[: index % len(NAMES)]
            for name in order if index % 2 else reversed(order):
                cost = decode(talks[name], part)
                if index:
                    found[name].append(cost)
    rows = []
    for name, costs in found.items():
        pairs = zip(found["none"], costs, strict=True)
        each = {key: quartiles([cost[key] / tokens for cost in costs])[1] for key in costs[0]}
        rows.append(
            {
                "prefetcher": name,
                "budget_mib": budget_mb,
                "speed": quartiles([base["took"] / cost["took"] for base, cost in pairs]),
                "token_ms": 1e3 * each["took"],
                "wait_ms": 1e3 * each["wait"],
                "hit_rate": sum(cost["hits"] for cost in costs) / sum(cost["lookups"] for cost in costs),
                **{f"{key}_kib": each[key] / 1024 for key in ("needed", "ahead", "used", "wasted")},
                "off_share": sum(cost["off"] for cost in costs) / tokens / rounds,
            }
        )
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-mb", default="3,6.4,10", help="MiB for experts, one or more")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--policy", default="next-use", help="of the cache")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.rounds < 2 or given.tokens < 1:
        parser.error("--rounds has to be 2 or more, --tokens 1 or more")
    source = Path(find_model(MODEL)).parent / "heldout.jsonl"
    texts = [json.loads(line)["text"] for line in source.read_text("utf-8").splitlines()]
    rows = []
    for budget in map(float, given.budget_mb.split(",")):
        rows += measure(given.policy, budget, texts, given.rounds, given.tokens)
    if given.json:
        print(json.dumps({"benchmark": "prefetchers", "policy": given.policy, "tokens": given.tokens, "rows": rows}))
        return
    head = ["MiB", "prefetcher", "speed (quartiles)", "ms a token", "waiting, ms", "hits"]
    head += ["KiB needed", "ahead", "used", "wasted", "off"]
    print(f"| {' | '.join(head)} |")
    print("|---" * len(head) + "|")
    for row in rows:
        low, middle, high = row["speed"]
        speed = "" if row["prefetcher"] == "none" else f"{middle:.2f} ({low:.2f} to {high:.2f})"
        kib = " | ".join(f"{row[f'{key}_kib']:.0f}" for key in ("needed", "ahead", "used", "wasted"))
        print(
            f"| {row['budget_mib']:g} | `{row['prefetcher']}` | {speed} | {row['token_ms']:.1f} | {row['wait_ms']:.1f} "
            f"| {row['hit_rate']:.1%} | {kib} | {row['off_share']:.0%} |"
        )


if __name__ == "__main__":
    main()
