"""What decoding and a wide prefill hold in memory at most, against what they are said to need.

    python benchmarks/memory.py [--quick] [--json] [--plot FILE]

Each cell runs in a process of its own: the cache off, just above one token's experts, a quarter and half of all. The
sum is baseline after the imports + weights outside the experts + budget (or slots) + KV + compute buffers; ``ratio`` =
peak resident memory / that sum, to be at most 1.03. The prompt is as wide as a ubatch, so that its routings use nearly
every expert of a layer. Pages of mapped files, which the system may take back, are part of the peak and are also given
apart.
"""

from __future__ import annotations

import math
from typing import Any

from device import facts_of
from models import model_file, parser_of
from report import Bar, Plot, publish
from worker import random_tokens, run_once

PROGRAM = """
import json, sys
from bmoe.testing.account import measure
print(json.dumps(measure(**json.load(sys.stdin))))
"""


def cell(model: str, budget_mb: float, ubatch: int, tokens: int, threads: int) -> dict[str, Any]:
    """One run in a process of its own."""
    n_vocab = facts_of(model).n_vocab
    wanted = {
        "model": model,
        "profile": {"model": {"threads": threads, "ctx": 2 * ubatch + tokens, "ubatch": ubatch}},
        "overrides": [f"cache.budget_mb={budget_mb}"],
        "prompt": random_tokens(ubatch, n_vocab),
        "tokens": random_tokens(tokens, n_vocab, first=ubatch),
    }
    return {"budget_mb": budget_mb, **run_once(PROGRAM, wanted, f"the run with cache.budget_mb={budget_mb}")}


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, tokens=16)
    parser.add_argument("--ubatch", type=int, default=512, help="tokens of the prompt, computed at a time")
    arguments = parser.parse_args()
    model = arguments.model or model_file(8 if arguments.quick else 24, arguments.folder)
    facts = facts_of(model)
    shares = (facts.cycle_bytes * 1.05 + 2**20, facts.expert_bytes / 4, facts.expert_bytes / 2)
    budgets = [0, *(math.ceil(nbytes / 2**20) for nbytes in shares)]
    cells = [cell(model, mib, arguments.ubatch, arguments.tokens, arguments.threads) for mib in budgets]
    result = {"benchmark": "memory", "ubatch": arguments.ubatch, "model": model, "cells": cells}
    lines: list[str] = []
    for found in cells:
        ratio, mib = found["ratio"], found["sum_bytes"] / 2**20
        told = ", ".join(f"{phase} {value:.3f}" if value else f"{phase} unmeasured" for phase, value in ratio.items())
        lines.append(f"cache {found['budget_mb']} MiB: peak / sum of {mib:.0f} MiB: {told}")
        lines.append(
            "  " + ", ".join(f"{name} {nbytes / 2**20:.0f}" for name, nbytes in found["parts"].items()) + " MiB"
        )
        lines.append(
            f"  of what is resident at the end, pages of mapped files: {(found['resident']['mapped'] or 0) >> 20} MiB"
        )
    bars = [
        Bar(f"cache {found['budget_mb']} MiB, {phase}", *[value or 0.0] * 3)
        for found in cells
        for phase, value in found["ratio"].items()
    ]
    publish(result, arguments, lines, Plot("Peak memory against the sum of its parts", "ratio", bars, 1.03))


if __name__ == "__main__":
    main()
