"""What placements of the dense weights cost: memory and processor time of an open, of a prompt and of a token.

    python benchmarks/dense.py [--quick] [--json] [--plot FILE] [--placements mmap anon …]

Every run is a process of its own with the cache off; placements take turns. Processor time is told, not time: it is
less of a matter what else the machine does.
"""

from __future__ import annotations

from typing import Any

from device import facts_of
from models import model_file, parser_of
from pairs import quartiles
from report import Bar, Plot, publish
from worker import random_tokens, run_once

PROMPT = 128
PROGRAM = """
import json, sys, time
import bmoe
wanted = json.load(sys.stdin)
began = time.process_time()
with bmoe.open(wanted["profile"], wanted["model"]) as engine, engine.conversation() as conversation:
    opened, memory = time.process_time() - began, engine.process.sample()
    conversation.feed(wanted["prompt"])
    conversation.clear()
    prompt = conversation.feed(wanted["prompt"]).cpu_s
    tokens = [conversation.feed([token]).cpu_s for token in wanted["tokens"]]
    print(json.dumps({
        "open_cpu_s": opened, "open_peak_bytes": engine.open_peak_rss_bytes,
        "anon_bytes": memory.rss_anon_bytes, "file_bytes": memory.rss_file_bytes,
        "prompt_cpu_s": prompt, "token_cpu_s": sum(tokens) / len(tokens), "dense": engine.record.resolved["dense"],
    }))
"""


def run(model: str, placement: str, threads: int, tokens: int) -> dict[str, Any]:
    """One process."""
    n_vocab = facts_of(model).n_vocab
    wanted = {
        "model": model,
        "profile": {
            "model": {"threads": threads, "ctx": 512, "ubatch": PROMPT},
            "cache": {"budget_mb": 0},
            "dense": {"placement": placement},
        },
        "prompt": random_tokens(PROMPT, n_vocab),
        "tokens": random_tokens(tokens, n_vocab, first=PROMPT),
    }
    return run_once(PROGRAM, wanted, f"dense.placement = {placement!r}")


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, tokens=24)
    names = ["mmap", "warm", "anon", "locked", "repack"]
    parser.add_argument("--placements", nargs="+", default=names, metavar="NAME", help=f"({' '.join(names)})")
    arguments = parser.parse_args()
    model = arguments.model or model_file(8 if arguments.quick else 24, arguments.folder)
    rounds = arguments.pairs or (3 if arguments.quick else 5)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.placements}
    for _ in range(rounds):
        for name, found in runs.items():
            found.append(run(model, name, arguments.threads, arguments.tokens))
    figures = {
        name: {key: quartiles([each[key] for each in found]) for key in found[0] if key != "dense"}
        for name, found in runs.items()
    }
    result = {
        "benchmark": "dense",
        "placements": figures,
        "resolved": {name: found[-1]["dense"] for name, found in runs.items()},
        "threads": arguments.threads,
        "rounds": rounds,
        "model": model,
    }
    lines = []
    for name, f in figures.items():
        mib = {key: f[key][1] / 2**20 for key in ("open_peak_bytes", "anon_bytes", "file_bytes")}
        lines.append(
            f"{name}: open {f['open_cpu_s'][1]:.2f} s of processor and {mib['open_peak_bytes']:.0f} MiB at most; then "
            f"{mib['anon_bytes']:.0f} MiB of its own and {mib['file_bytes']:.0f} of files; prompt "
            f"{f['prompt_cpu_s'][1]:.2f} s, token {f['token_cpu_s'][1] * 1e3:.1f} ms of processor"
        )
    bars = [Bar(name, *(value * 1e3 for value in f["token_cpu_s"])) for name, f in figures.items()]
    publish(result, arguments, lines, Plot("Where dense weights live", "processor time of a token, ms", bars))


if __name__ == "__main__":
    main()
