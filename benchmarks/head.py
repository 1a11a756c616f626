"""What a model's head for next-token prediction costs beside its trunk, and how often the trunk agrees with it.

    python benchmarks/head.py [--model FILE] [--budget-mb MB] [--tokens N] [--rounds N] [--threads N] [--json]

Prompts from the held-out text that comes with the reference model are continued greedily. Before each token the head
guesses three, one after the other. Each guess is held against the text that the trunk then writes; one counts for its
position only if those before it were right. A prompt is followed twice: cut at the head's router, and computed to its
end, on engines of their own in turns. Bytes are those of expert reads at a budget; times are medians of rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from unittest import mock

from report import machine

from bmoe.bundled import find_set
from bmoe.costs import DecodeCost
from bmoe.engine import Engine
from bmoe.resolve import resolve
from bmoe.testing.followed import Followed

DEPTH, PROMPT = 3, 64


@dataclass
class Costs:
    """Sums over as many decodes, or prompts, of one kind, and seconds of each."""

    count: int = 0
    read_bytes: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, cost: DecodeCost, seconds: float, count: int) -> None:
        """So many more, which cost this together."""
        self.count += count
        self.read_bytes += cost.all_bytes
        self.seconds.append(seconds / count)

    def told(self) -> dict[str, float]:
        """Of each."""
        return {"ms": median(self.seconds) * 1e3, "bytes": self.read_bytes / self.count, "count": self.count}


def opened(model: str, budget_mb: float, threads: int) -> Followed:
    """A trunk and its head, with a cache of so many MiB for both."""
    table = {
        "model": {"path": model, "ctx": 512, "ubatch": 64, "threads": threads},
        "cache": {"policy": "lru" if budget_mb else "auto", "budget_mb": budget_mb},
        "draft": {"drafter": "mtp", "max_draft": DEPTH},
    }
    return Followed(Engine(resolve(table)))


def compare_follow(one: Followed, other: Followed, prompt: Sequence[int], found: dict[str, Costs]) -> None:
    """Follow a prompt with the graph cut on ``one``, and computed to its end on ``other``."""
    real = Engine.perform

    def to_the_end(engine: Engine, *args: Any, cut: bool = False) -> DecodeCost:
        return real(engine, *args)

    for name, each in (("cut", one), ("whole", other)):
        each.clear()
        each.read(prompt)
        began = time.perf_counter()
        if name == "cut":
            cost = each.head.follow()
        else:
            with mock.patch.object(Engine, "perform", to_the_end):
                cost = each.head.follow()
        found[name].add(cost, time.perf_counter() - began, 1)


def write(one: Followed, prompt: Sequence[int], tokens: int, found: dict[str, Costs]) -> tuple[list[int], list[int]]:
    """Continue a prompt, guessing before each token; how many guesses were right of those tried, by position."""
    one.clear()
    token, _ = one.read(prompt)
    text, guesses = list[int](), list[list[int]]()
    for _ in range(tokens):
        began = time.perf_counter()
        levels, cost = one.head.guess(token, DEPTH)
        found["guess"].add(cost, time.perf_counter() - began, len(levels))
        guesses.append([level[0][0] for level in levels])
        text.append(token)
        began = time.perf_counter()
        token, cost = one.read([token], "decode")
        found["token"].add(cost, time.perf_counter() - began, 1)
    right, tried = [0] * DEPTH, [0] * DEPTH
    for at, guess in enumerate(guesses):
        for depth, (said, true) in enumerate(zip(guess, text[at + 1 :], strict=False)):
            tried[depth] += 1
            right[depth] += said == true
            if said != true:
                break
    return right, tried


def measure(model: str, budget_mb: float, tokens: int, rounds: int, threads: int) -> dict[str, Any]:
    """All figures at one budget."""
    found = {name: Costs() for name in ("cut", "whole", "guess", "token")}
    right, tried = [0] * DEPTH, [0] * DEPTH
    one, other = (opened(model, budget_mb, threads) for _ in range(2))
    with one.engine, other.engine:
        for prompt in prompts(one, rounds):
            compare_follow(one, other, prompt, found)
            more, of = write(one, prompt, tokens, found)
            right, tried = ([a + b for a, b in zip(*pair, strict=True)] for pair in ((right, more), (tried, of)))
        facts, held = one.engine.facts, one.head.nbytes
    return {
        "budget_mb": budget_mb,
        "costs": {name: costs.told() for name, costs in found.items()},
        "agreement": [{"right": a, "tried": b} for a, b in zip(right, tried, strict=True)],
        "head_bytes": sum(bank.nbytes for bank in facts.nextn_banks),
        "trunk_bytes": facts.expert_bytes,
        "held_bytes": held,
    }


def prompts(one: Followed, count: int) -> list[list[int]]:
    """Pieces of the held-out text."""
    with open(find_set("heldout"), encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    tokens = one.engine.model.tokenize("\n".join(texts))
    step = len(tokens) // count
    return [tokens[at * step : at * step + PROMPT] for at in range(count)]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bmoe-ref", help="a gguf with a head (default: the reference model)")
    parser.add_argument("--budget-mb", type=float, nargs="+", default=[0, 6.4, 64], help="cache budgets, MiB")
    parser.add_argument("--tokens", type=int, default=64, help="tokens written after each prompt")
    parser.add_argument("--rounds", type=int, default=12, help="prompts of 64 tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    cells = [measure(given.model, mb, given.tokens, given.rounds, given.threads) for mb in given.budget_mb]
    if given.json:
        print(json.dumps({"benchmark": "head", "cells": cells, "machine": machine()}))
        return
    for cell in cells:
        print(f"cache {cell['budget_mb']:g} MiB")
        for name, said in {
            "token": "a token of the trunk",
            "guess": "a guess of the head",
            "cut": "a prompt followed, cut",
            "whole": "the same, uncut",
        }.items():
            cost = cell["costs"][name]
            print(f"  {said:27} {cost['ms']:8.2f} ms {cost['bytes'] / 1024:10.1f} KiB read")
        shares = [f"{a['right']} of {a['tried']}" for a in cell["agreement"]]
        print(f"  right at position 1, 2, 3: {', '.join(shares)}")
        print(f"  experts of the head {cell['head_bytes']}, of the trunk {cell['trunk_bytes']} bytes")
        print(f"  KV, buffers and states of the head {cell['held_bytes']} bytes")


if __name__ == "__main__":
    main()
