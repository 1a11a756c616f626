"""A model opened in a process of its own, that decodes given tokens on request and reports what they cost.

Speaks JSON lines: ``{"tokens": [...], "prompt": [...]}`` in, costs out. Tokens are given, not sampled, so that two
engines do the same work.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bmoe
from bmoe.plan import Plan
from bmoe.resolve import resolve


class Worker:
    """The other end of the pipe; use in a ``with`` block. ``program`` is one that calls :func:`serve`."""

    def __init__(self, model: str, *overrides: str, threads: int = 1, program: str = __file__) -> None:
        settings = [
            "fetch.plugin=aio",
            f"model.threads={threads}",
            *overrides,
        ]  # the one that the device is measured by
        command = [sys.executable, program, model, *settings]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.opened = self._read()
        self.pid = self._process.pid

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Start over and decode ``prompt``, a ubatch at a time; costs are of all of it."""
        return self.decode(prompt, [])

    def decode(self, prompt: list[int] | str, tokens: list[int], **more: Any) -> dict[str, Any]:
        """Start over with ``prompt``, decode ``tokens`` one by one; costs are of the tokens, of the prompt if none.

        ``more`` is for the ``before`` of the program.
        """
        assert self._process.stdin is not None
        print(json.dumps({"prompt": prompt, "tokens": tokens, **more}), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the benchmark's worker ended with {self._process.wait()}; its message is above")
        return dict(json.loads(line))


def run_once(program: str, wanted: dict[str, Any], said: str) -> dict[str, Any]:
    """What a program that reads ``wanted`` prints as JSON, in a process of its own; ``said`` names it if it fails."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=json.dumps(wanted), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{said} failed: {done.stderr[-1000:]}")
    return dict(json.loads(done.stdout))


def random_tokens(count: int, vocabulary: int, first: int = 0) -> list[int]:
    """The i-th is drawn with seed ``first + i``, as another engine can do too."""
    import numpy as np

    return [int(np.random.default_rng(first + i).integers(vocabulary)) for i in range(count)]


def huge_bytes() -> int | None:
    """Bytes of this process that lie in huge pages, its own and the page cache's; None where that cannot be read."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("AnonHuge", "FilePmdMapped")))


def hook_counts(engine: bmoe.Engine) -> dict[str, int]:
    """What the compiled eval hook has counted since the open; nothing for the Python form."""
    state = getattr(engine.seam, "_state", None)
    return {} if state is None else {key: getattr(state, key) for key in ("asks", "routings", "entered")}


def plan_of(model: str, overrides: list[str]) -> Plan:
    """The plan of a profile that says nothing but ``overrides``; the cache is off by default."""
    return resolve({"cache": {"budget_mb": 0}}, model=model, overrides=overrides)


def serve(plan: Plan, before: Callable[[dict[str, Any]], None] = lambda wanted: None) -> None:
    """The worker's side; ``before`` sees each request when its prompt was decoded."""
    with bmoe.Engine(plan) as engine:
        conversation = engine.conversation()
        n_vocab = engine.model.n_vocab
        report = engine.model.report
        facts = {
            "n_vocab": n_vocab,
            "expert_bytes": engine.facts.expert_bytes,
            "cycle_bytes": engine.facts.cycle_bytes,
            "open_read_bytes": report.read_bytes,
            "direct_io": engine.stream.fetcher.direct if engine.stream is not None else None,
            "budget_bytes": engine.plan.budget.bytes,
        }
        print(json.dumps(facts), flush=True)
        for line in sys.stdin:
            wanted = json.loads(line)
            conversation.clear()
            prompt = wanted["prompt"]
            fed = conversation.feed(engine.model.tokenize(prompt) if isinstance(prompt, str) else prompt)
            before(wanted)
            counts = hook_counts(engine)
            costs = [conversation.feed([token]) for token in wanted["tokens"]] or [fed]
            counted = {key: after - counts[key] for key, after in hook_counts(engine).items()}
            n = len(costs)
            seconds = [cost.decode_s for cost in costs]
            answer = {
                "decode_s": sum(seconds),
                "median_s": sorted(seconds)[n // 2],
                "cpu_s": sum(cost.cpu_s for cost in costs),
                "tok_s": n / sum(seconds),
                "hit_rate": sum(c.hits or 0 for c in costs) / max(1, sum(c.lookups or 0 for c in costs)),
                "bytes": sum(cost.read_bytes or 0 for cost in costs),
                "ahead_bytes": sum(cost.ahead_bytes or 0 for cost in costs),
                "wasted_bytes": sum(cost.wasted_bytes or 0 for cost in costs),
                "wait_s": sum(cost.read_wait_s or 0 for cost in costs),
                "manage_s": sum(cost.manage_s or 0 for cost in costs),
                "peak_rss_bytes": engine.process.peak_rss_bytes(),
                "huge_bytes": huge_bytes(),
                **counted,
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(plan_of(sys.argv[1], sys.argv[2:]))
