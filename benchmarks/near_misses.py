"""Whether near misses predict: how often the next token uses an expert that the router nearly chose, and what it saves.

    python benchmarks/near_misses.py [--model MODEL] [--texts FILE] [--tokens N] [--budgets 3,6.4,10] [--json]

Texts are decoded token by token through the streaming engine, and what the router gave to every expert is recorded as a
Parquet trace. Of the experts that a token did not use, those with the next most probabilities, as many as it used, are
near misses. They are compared with the other unused experts, as they are and with those that have the same decayed use
count (half-life 8, in bins of half a power of two). Then `next-use` and `router-ema` replay the same trace, and
`router-ema` once more with the probabilities of all experts that were not used taken away.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import bmoe
from bmoe.bundled import find_model
from bmoe.replay.contender import Contender
from bmoe.replay.lookups import Lookups
from bmoe.replay.parquet import parquet_lookups

FADE = 2 ** (-1 / 8)
SKIP = 100  # tokens until counts say something


def record(model: str, texts: Path, tokens: int, folder: Path) -> Lookups:
    """A trace of at least ``tokens`` tokens of whole texts, all of them counted."""
    path = folder / "near.parquet"
    table = {"model": {"threads": 1, "ctx": 512, "ubatch": 1}, "stream": {"overlap": "off"}}
    done = 0
    with bmoe.open(table, model, [f'trace.route="{path}"']) as engine, engine.conversation() as conversation:
        for line in texts.read_text("utf-8").splitlines():
            given = engine.model.tokenize(json.loads(line)["text"])[:500]
            conversation.clear()
            conversation.feed(given)
            done += len(given)
            if done >= tokens:
                break
    _, trace = parquet_lookups(str(path))
    return replace(trace, counted=np.ones(len(trace.counted), np.bool_), tokens=done)


def predict(trace: Lookups) -> dict[str, float]:
    """How often experts are used by the next token: those used now, near misses, the others, near misses' equals."""
    assert trace.probs is not None
    layers = trace.keys[trace.starts[:-1]] >> 24
    sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in ("used", "near", "other", "equal")}

    def add(name: str, hits: float, of: float) -> None:
        sums[name][0] += hits
        sums[name][1] += of

    for layer in np.unique(layers):
        touches = np.flatnonzero(layers == layer)
        used = np.zeros((len(touches), trace.n_expert), np.bool_)
        for row, touch in enumerate(touches):
            used[row, trace.keys[trace.starts[touch] : trace.starts[touch + 1]] & 0xFFFF] = True
        counts = np.zeros((len(touches), trace.n_expert))
        for row in range(1, len(touches)):
            counts[row] = counts[row - 1] * FADE + used[row]
        now, after, counts = used[SKIP:-1], used[SKIP + 1 :], counts[SKIP:-1]
        unused = np.where(now, -1.0, trace.probs[touches][SKIP:-1])
        rank = np.argsort(np.argsort(-unused, axis=1), axis=1)
        near = ~now & (rank < trace.n_used)
        other = ~now & ~near
        bins = np.floor(2 * np.log2(counts + 1e-6))
        for name, mask in (("used", now), ("near", near), ("other", other)):
            add(name, after[mask].sum(), mask.sum())
        for each in np.unique(bins[near]):
            same, equals = near & (bins == each), other & (bins == each)
            if equals.any():
                add("equal", same.sum() * float(after[equals].mean()), same.sum())
    return {name: hits / of for name, (hits, of) in sums.items()}


def chosen_only(trace: Lookups) -> Lookups:
    """The trace with the probabilities of experts that were not used set to 0, and their sum as it was."""
    assert trace.probs is not None
    probs = np.zeros_like(trace.probs)
    rows = np.repeat(np.arange(len(trace.counted)), np.diff(trace.starts))
    probs[rows, trace.keys & 0xFFFF] = trace.probs[rows, trace.keys & 0xFFFF]
    probs *= trace.probs.sum(axis=1, keepdims=True) / probs.sum(axis=1, keepdims=True)
    return replace(trace, probs=probs)


def main() -> None:
    """Record, count, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bmoe-ref")
    parser.add_argument("--texts", type=Path, help="lines of JSON with a text each (what comes with bmoe-ref)")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--budgets", default="1.5,3,6.4,10,14", help="MiB")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    texts = given.texts or Path(find_model("bmoe-ref")).parent / "heldout.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        trace = record(given.model, texts, given.tokens, Path(folder))
    blind = chosen_only(trace)
    sides = {
        "lru": (Contender("lru", "lru"), trace),
        "next-use": (Contender("next-use", "next-use"), trace),
        "router-ema": (Contender("router-ema", "router-ema"), trace),
        "router-ema, chosen only": (Contender("router-ema", "router-ema"), blind),
        "belady": (Contender("belady", "belady"), trace),
    }
    budgets = [float(part) for part in given.budgets.split(",")]
    hits: dict[str, list[Any]] = {
        name: [side.play(each, round(mib * (1 << 20))).hit_rate for mib in budgets]
        for name, (side, each) in sides.items()
    }
    result: dict[str, Any] = {"tokens": trace.tokens, "base": trace.n_used / trace.n_expert, **predict(trace)}
    if given.json:
        print(json.dumps({**result, "budgets": budgets, "hits": hits}))
        return
    print(f"{trace.tokens} tokens, base rate {100 * trace.n_used / trace.n_expert:.1f} %; used by the next token:")
    for name in ("used", "near", "equal", "other"):
        print(f"  {name:24} {100 * result[name]:5.1f} %")
    print("hit rate %, MiB:" + "".join(f"{mib:8g}" for mib in budgets))
    for name, rates in hits.items():
        print(f"  {name:24}" + "".join(f"{100 * rate:8.1f}" for rate in rates))


if __name__ == "__main__":
    main()
