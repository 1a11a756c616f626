"""Where a token's time goes with every expert resident, by library: streamed, and plain llama.cpp beside it.

    python benchmarks/hot_path.py [--quick] [--json] [--plot FILE]

Samples each process with ``perf record`` while it decodes the same tokens, after everything was read. ``_seam`` is the
compiled eval hook, ``python`` the interpreter with what it calls: what they take of a streamed token is what streaming
costs when nothing is missing. ``asks``, ``routings`` and ``entered`` are the hook's own counts per token: nodes asked
about, routings looked at, and how often Python was entered. Needs Linux's ``perf`` and the right to use it
(``kernel.perf_event_paranoid`` of 1 or less, or root).
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from device import facts_of
from models import model_file, parser_of
from report import Bar, Plot, publish
from worker import Worker, random_tokens

PARTS = (
    ("_seam", r"_seam\."),
    ("ggml", r"libggml"),
    ("llama", r"libllama"),
    ("python", r"python|_ctypes|ffi|numpy|multiarray|\[unknown\]"),
    ("libc", r"libc\.|libm\.|libstdc|ld-linux|libgomp"),
    ("kernel", r"kernel|vdso"),
)


def sampled(worker: Worker, prompt: list[int], given: list[int], rounds: int) -> dict[str, float]:
    """Milliseconds of a token in each part: shares of the samples times the measured processor time."""
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/perf.data"
        command = ["perf", "record", "-q", "-F", "4000", "-p", str(worker.pid), "-o", data]
        perf = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        worker.decode(prompt, given)  # until perf has begun
        cpu = sum(worker.decode(prompt, given)["cpu_s"] for _ in range(rounds)) / rounds / len(given)
        perf.send_signal(signal.SIGINT)
        said = perf.communicate()[1]
        if not Path(data).exists():
            raise SystemExit(f"perf cannot sample here: {said.strip()}")
        report = ["perf", "report", "-i", data, "--no-children", "--sort", "dso", "-g", "none", "--percent-limit", "0"]
        text = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    found: Counter[str] = Counter()
    for share, name in re.findall(r"^\s*([\d.]+)%\s+(?:\S+\s+)?(\S+)\s*$", text, re.MULTILINE):
        part = next((label for label, pattern in PARTS if re.search(pattern, name)), "other")
        found[part] += float(share) / 100
    total = sum(found.values())
    return {part: cpu * 1e3 * share / total for part, share in found.items()}


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, tokens=24)
    arguments = parser.parse_args()
    if not shutil.which("perf"):
        raise SystemExit("this needs perf: install linux-perf (Debian), linux-tools (Ubuntu) or perf (Fedora)")
    model = arguments.model or model_file(8 if arguments.quick else 24, arguments.folder)
    rounds = arguments.pairs or (3 if arguments.quick else 6)
    everything = f"cache.budget_mb={1 << 20}"
    with (
        Worker(model, "stream.enabled=false", threads=arguments.threads) as plain,
        Worker(model, everything, threads=arguments.threads) as streamed,
    ):
        n_vocab = plain.opened["n_vocab"]
        prompt, given = random_tokens(8, n_vocab), random_tokens(arguments.tokens, n_vocab)
        for worker in (plain, streamed):
            worker.decode(prompt, given)
        cost = streamed.decode(prompt, given)
        if cost["hit_rate"] < 1.0:
            raise SystemExit("not every look-up was a hit: the profile would be of something else")
        parts = {"plain": sampled(plain, prompt, given, rounds), "streamed": sampled(streamed, prompt, given, rounds)}
    counts: dict[str, Any] = {key: cost[key] / arguments.tokens for key in ("asks", "routings", "entered")}
    result = {
        "benchmark": "hot_path",
        "ms_per_token": parts,
        "per_token": counts,
        "layers": len(facts_of(model).banks),
        "threads": arguments.threads,
        "model": model,
    }
    lines = [f"per token: {', '.join(f'{value:.0f} {key}' for key, value in counts.items())}"]
    names = [label for label, _ in PARTS] + ["other"]
    for name in names:
        shown = [parts[side].get(name, 0.0) for side in ("plain", "streamed")]
        lines.append(f"{name:8} plain {shown[0]:8.3f} ms   streamed {shown[1]:8.3f} ms")
    bars = [Bar(f"{name}, streamed", *[parts["streamed"].get(name, 0.0)] * 3) for name in names]
    publish(result, arguments, lines, Plot("A token with every expert resident", "processor time, ms", bars))


if __name__ == "__main__":
    main()
