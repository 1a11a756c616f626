"""What `edgexpert-prefill` saves of a prompt's reads, and what it costs the text after it, on the reference model.

Example: .venv/bin/python scripts/measure_prompt_reuse.py --prompts 4 --scorers position idf

Prompts of 400 tokens come from the held-out text, one after another. Each is read with the policy, and the 100 tokens
that follow in the text are then decoded one by one, so that the perplexity is that of the continuation: scoring the
prompt itself would price tokens that nobody generates. Prints one line per budget and setting: MiB read for a prompt
(mean), perplexity of the continuations, and the ratio of both to the run without the policy. The interval is that of
the perplexity's ratio, 95 %, from 2000 resamples of the prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from typing import Any

import numpy as np

import bmoe
from bmoe.bundled import find_model

PROMPT, AFTER, MIB = 400, 100, 1 << 20
REPEATS, TRIVIAL = 2000, 2.0


def main() -> int:
    """Measure every setting at every budget and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--scorers", nargs="*", default=["position", "idf"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[3, 6.4, 10])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--overlap", default="auto", help="stream.overlap; with off no layer is read ahead whole")
    parser.add_argument("--reads-only", action="store_true", help="do not decode what follows a prompt")
    args = parser.parse_args()
    texts = _texts(args.prompts)
    columns = ["cache, MiB", "setting", "MiB per prompt", "ratio"]
    columns += [] if args.reads_only else ["perplexity after it", "ratio"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    settings: list[tuple[str, dict[str, Any] | None]] = [("without", None)]
    settings += [(f"`{name}`", {"importance": name}) for name in args.scorers]
    alike = {"importance": "uniform", "high": TRIVIAL}
    settings += [("`uniform`, all minor", alike), ("`uniform`, all trivial", {**alike, "low": TRIVIAL})]
    for budget in args.budgets:
        plain: tuple[float, list[float]] | None = None
        for name, options in settings:
            read, losses = _run(texts, budget, options, args)
            plain = plain or (read, losses)
            low, high = _interval([a - b for a, b in zip(losses, plain[1], strict=True)])
            worse = np.exp(np.mean(losses) - np.mean(plain[1]))
            shown = f"{worse:.3f} ({low:.3f}-{high:.3f})" if options else "1"
            perplexity = np.exp(np.mean(losses))
            price = "" if args.reads_only else f" {perplexity:.2f} | {shown} |"
            print(f"| {budget:g} | {name} | {read:.2f} | {read / plain[0]:.2f} |{price}", flush=True)
    return 0


def _texts(count: int) -> list[list[int]]:
    """Token ids of consecutive parts of the held-out text."""
    file = find_model("bmoe-ref").rpartition("/")[0] + "/heldout.jsonl"
    with open(file, encoding="utf-8") as lines:
        text = "\n".join(json.loads(line)["text"] for line in lines)
    with bmoe.open("demo", overrides=["sink=[]"]) as engine:
        tokens = engine.model.tokenize(text)
    whole = PROMPT + AFTER
    return [tokens[at * whole : (at + 1) * whole] for at in range(min(count, len(tokens) // whole))]


def _run(
    texts: list[list[int]], budget: float, options: dict[str, Any] | None, args: argparse.Namespace
) -> tuple[float, list[float]]:
    """MiB read per prompt, and of each continuation the mean negative log-likelihood of a token."""
    profile = {
        "model": {"path": "bmoe-ref", "ctx": 512, "ubatch": 64, "threads": args.threads},
        "stream": {"overlap": args.overlap},
        "cache": {"budget_mb": budget},
        "routing": [{"plugin": "edgexpert-prefill", "options": options}] if options else [],
    }
    read, losses = 0, []
    with bmoe.open(profile) as engine, engine.conversation() as one:
        for text in texts:
            one.clear()
            read += one.feed(text[:PROMPT]).read_bytes or 0
            lost = 0.0
            for token in () if args.reads_only else text[PROMPT:]:
                row = one.logits().astype(np.float64)
                lost += float(np.log(np.exp(row - row.max()).sum()) + row.max() - row[token])
                one.feed([token], "decode")
            losses.append(lost / AFTER)
    return read / MIB / len(texts), losses


def _interval(differences: list[float]) -> tuple[float, float]:
    draw = random.Random(0)
    means = sorted(float(np.mean(draw.choices(differences, k=len(differences)))) for _ in range(REPEATS))
    return float(np.exp(means[REPEATS // 40])), float(np.exp(means[-REPEATS // 40 - 1]))


if __name__ == "__main__":
    sys.exit(main())
