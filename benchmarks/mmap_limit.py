"""Tokens per second where memory is limited to half the model: bmoe against plain llama.cpp, which maps the file.

    python benchmarks/mmap_limit.py [--quick] [--json] [--plot FILE] [--budget MiB]

Both run in processes that a memory control group (version 2 or 1) or a systemd scope limits to half the size of the
file; the limit covers the page cache that they fill. The baseline is llama.cpp with its mapping and without repacking
(``stream.enabled=false``): the system reads pages as they are touched. Its own defaults, profile ``resident``, copy the
weights into memory of the process where the processor has a repacked form, and then do not fit at all; they are run
once, and what became of it is in ``defaults``.

bmoe runs with the same context and a budget that is what the limit leaves ("auto", with 256 MiB more for the process
itself, or ``--budget``). Every run is a fresh process over a cold file: its page cache is dropped before with
posix_fadvise, which needs no privileges; making the control group does (root, or a delegated group). Runs alternate;
``ratio`` = ours / theirs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from device import facts_of
from models import model_file, parser_of
from pairs import interleave, quartiles
from report import Bar, Plot, publish
from worker import random_tokens

from bmoe.testing.limits import MemoryLimit, memory_limit

CONTEXT = 512
PROMPT = 4
PROGRAM = """
import json, sys, time
import bmoe
wanted = json.load(sys.stdin)
with bmoe.open(wanted["profile"], wanted["model"], wanted["overrides"]) as engine:
    conversation = engine.conversation()
    conversation.feed(wanted["prompt"])
    before = engine.process.sample()
    began, faults, read = time.perf_counter(), 0, 0
    for token in wanted["tokens"]:
        read += conversation.feed([token]).read_bytes or 0
        faults += engine.process.sample().majflt or 0
    took = time.perf_counter() - began
    store = engine.stream.store if engine.stream is not None else None
    print(json.dumps({
        "tok_s": len(wanted["tokens"]) / took, "majflt": faults, "bytes": read, "open_s": engine.open_s,
        "budget_bytes": store.budget_bytes if store is not None else None,
        "peak_rss_bytes": engine.process.peak_rss_bytes(), "notices": list(engine.record.notices),
    }))
"""


def drop_cache(paths: list[str]) -> None:
    """Let the system forget what it has cached of these files."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Runner:
    """Runs one side or the other in a limit of its own, and keeps what each run said."""

    def __init__(self, model: str, limit: int, threads: int, budget: str) -> None:
        facts = facts_of(model)
        self.paths, self.n_vocab = [shard.path for shard in facts.shards], facts.n_vocab
        self.model, self.limit, self.kind = model, limit, ""
        common = [f"model.threads={threads}", f"model.ctx={CONTEXT}", f"model.ubatch={PROMPT}"]
        # what is mapped of the weights outside the experts must fit beside the cache, else every token reads it again
        floor = (facts.dense_bytes >> 20) + 256
        self.overrides = {
            "bmoe": [*common, f"cache.budget_mb={budget}", f"cache.floor_mb={floor}", "cache.watch=warn"],
            "llama.cpp": [*common, "stream.enabled=false"],
            "defaults": common,
        }
        self.runs: dict[str, list[dict[str, Any]]] = {side: [] for side in self.overrides}

    def run(self, side: str, tokens: int, first: int) -> float:
        """Tokens per second of one run over a cold file."""
        drop_cache(self.paths)
        wanted = {
            "profile": "resident" if side == "defaults" else {},
            "model": self.model,
            "overrides": self.overrides[side],
            "prompt": random_tokens(PROMPT, self.n_vocab),
            "tokens": random_tokens(tokens, self.n_vocab, first=first),
        }
        with memory_limit(self.limit) as limit:
            if limit is None:
                raise SystemExit(
                    "this machine lets nobody limit memory here: no control group, no systemd; try as root"
                )
            self.kind = limit.kind
            found = self._limited(limit, side, wanted)
            found["charged_peak_bytes"] = limit.peak_bytes
        self.runs[side].append(found)
        said = f"{found['tok_s']:.3f} tokens per second" if "tok_s" in found else f"ended with {found['ended']}"
        print(f"{side}: {said}", file=sys.stderr, flush=True)
        if side == "defaults":
            return 0.0
        return float(found["tok_s"])

    def _limited(self, limit: MemoryLimit, side: str, wanted: dict[str, Any]) -> dict[str, Any]:
        command = limit.command([sys.executable, "-c", PROGRAM])
        done = subprocess.run(command, input=json.dumps(wanted), capture_output=True, text=True, check=False)
        if done.returncode and side == "defaults":
            return {"ended": done.returncode, "said": done.stderr[-300:]}
        if done.returncode:
            raise SystemExit(
                f"{side} ended with {done.returncode} under {limit.nbytes >> 20} MiB: {done.stderr[-800:]}"
            )
        return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, tokens=16)
    parser.add_argument("--budget", default='"auto"', help="cache.budget_mb of bmoe, in MiB (default: auto)")
    parser.add_argument("--limit", type=int, metavar="MIB", help="the limit (default: half the file)")
    arguments = parser.parse_args()
    model = arguments.model or model_file(8 if arguments.quick else 24, arguments.folder)
    pairs = arguments.pairs or (3 if arguments.quick else 5)
    limit = arguments.limit << 20 if arguments.limit else Path(model).stat().st_size // 2
    runner = Runner(model, limit, arguments.threads, arguments.budget)
    runner.run("defaults", arguments.tokens, 0)
    turn = iter(range(10**6))

    def side(name: str) -> float:
        # both sides of a pair get the same tokens, and every pair others
        return runner.run(name, arguments.tokens, 1000 * (next(turn) // 2 + 1))

    ratio = interleave(lambda: side("bmoe"), lambda: side("llama.cpp"), pairs)
    result = {
        "benchmark": "mmap_limit",
        **ratio.as_dict(),
        "limit_bytes": limit,
        "limited_by": runner.kind,
        "budget_bytes": runner.runs["bmoe"][-1]["budget_bytes"],
        "majflt_per_token": {
            name: quartiles([run["majflt"] / arguments.tokens for run in runner.runs[name]])
            for name in ("bmoe", "llama.cpp")
        },
        "defaults": runner.runs.pop("defaults")[0],
        "runs": runner.runs,
        "threads": arguments.threads,
        "model": model,
    }
    lines: list[str] = []
    lines.append(f"tokens per second under {limit >> 20} MiB ({runner.kind}), bmoe / llama.cpp with mmap: {ratio}")
    lines.append(f"  bmoe {ratio.first[1]:.2f}, llama.cpp {ratio.second[1]:.2f} (medians)")
    bars = [Bar(name, *values) for name, values in (("bmoe", ratio.first), ("llama.cpp, mmap", ratio.second))]
    title = f"Memory limited to {limit >> 20} MiB"
    publish(result, arguments, lines, Plot(title, "tokens per second", bars))


if __name__ == "__main__":
    main()
