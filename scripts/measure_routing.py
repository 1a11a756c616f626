"""How a model routes a text: use of every expert, and how alike neighbouring tokens are routed; as a route_trace v1.

The text is decoded token by token through the streaming engine. Of a .jsonl file the "text" of every line is a text of
its own, and a turn of the trace.

Example: .venv/bin/python scripts/measure_routing.py model.gguf held-out.txt --out trace.csv --plot usage.png
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bmoe
from bmoe.errors import BmoeError
from bmoe.replay.route_trace import Routed, RouteTrace, trace_of, write_trace
from bmoe.replay.usage import LayerUse, layer_use
from bmoe.routes import record_routes


def record(model: str, texts: Sequence[str], limit: int, ctx: int, budget_mb: int, threads: int | None) -> RouteTrace:
    """The routing of up to ``limit`` tokens of ``texts``; a turn is a text, or a window of ``ctx`` tokens of it."""
    profile: dict[str, Any] = {"model": {"ctx": ctx, "ubatch": 16}, "cache": {"budget_mb": budget_mb}}
    if threads:
        profile["model"]["threads"] = threads
    rows: list[Routed] = []
    with bmoe.open(profile, model) as engine:
        left = limit
        for turn, window in enumerate(_windows([engine.model.tokenize(text) for text in texts], ctx)):
            rows += record_routes(engine, window[:left], turn)
            left -= len(window)
            if left <= 0:
                break
        return trace_of(engine.facts, rows)


def _windows(texts: Sequence[Sequence[int]], size: int) -> Iterator[Sequence[int]]:
    for tokens in texts:
        yield from (tokens[start : start + size] for start in range(0, len(tokens), size))


def read_texts(path: Path) -> list[str]:
    """The texts of a file: the whole of it, or of a .jsonl file the "text" of every line."""
    data = path.read_text("utf-8")
    if path.suffix != ".jsonl":
        return [data]
    return [json.loads(line)["text"] for line in data.splitlines() if line.strip()]


def as_dict(use: LayerUse) -> dict[str, Any]:
    """For JSON; shares are over the even one."""
    return {
        "layer": use.layer,
        "tokens": use.tokens,
        "n_expert": len(use.counts),
        "n_used": use.n_used,
        "least_share": min(use.shares),
        "most_share": max(use.shares),
        "unused": use.counts.count(0),
        "overlap": use.overlap,
        "pairs": use.pairs,
        "chance": use.chance,
        "usage_chance": use.usage_chance,
        "counts": list(use.counts),
    }


def plot(uses: Sequence[LayerUse], title: str, path: Path) -> None:
    """A picture of every layer's use, experts sorted by it."""
    shares = [sorted(use.shares, reverse=True) for use in uses]
    figure = matplotlib_figure().Figure(figsize=(8, max(3.0, 1.4 + 0.3 * len(uses))), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, aspect="auto", cmap="viridis", vmin=0, vmax=max(2.0, *(row[0] for row in shares)))
    axes.set_yticks(range(len(uses)), [str(use.layer) for use in uses])
    axes.set_xlabel("expert, by rank of use (0 = most used)")
    axes.set_ylabel("layer (number of the block)")
    axes.set_title(title, fontsize="medium")
    figure.colorbar(image, label="use over even share (1 = even)")
    figure.savefig(path, dpi=150)


def matplotlib_figure() -> Any:
    """The module of figures; :class:`BmoeError` without matplotlib, which nothing else here needs."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise BmoeError("--plot needs matplotlib; install it (pip install matplotlib) or leave --plot out") from error


def table(uses: Sequence[LayerUse]) -> str:
    """One line per layer."""
    lines = [f"{'layer':>5} {'tokens':>7} {'least':>6} {'most':>6} {'overlap':>8} {'by use':>7} {'by chance':>9}"]
    for use in uses:
        overlap = "-" if use.overlap is None else f"{use.overlap:.3f}"
        lines.append(
            f"{use.layer:>5} {use.tokens:>7} {min(use.shares):>6.2f} {max(use.shares):>6.2f} {overlap:>8} "
            f"{use.usage_chance:>7.3f} {use.chance:>9.3f}"
        )
    return "\n".join([*lines, "least and most: use of an expert over its even share; overlap: with the token before"])


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, record, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a gguf with routed experts")
    parser.add_argument("text", type=Path, help="held-out text, or a .jsonl file of texts")
    parser.add_argument("--out", type=Path, required=True, help="the trace to write, in route_trace v1")
    parser.add_argument("--plot", type=Path, help="a picture of the use of experts (png, svg, pdf); needs matplotlib")
    parser.add_argument("--limit", type=int, default=4000, help="tokens at most (default 4000)")
    parser.add_argument("--ctx", type=int, default=512, help="tokens of a turn at most (default 512)")
    parser.add_argument("--budget-mb", type=int, default=1 << 20, help="the cache (default: room for every expert)")
    parser.add_argument("--threads", type=int, help="threads of llama.cpp (default: as the profile has)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        if arguments.plot:
            matplotlib_figure()  # before anything is measured
        texts = read_texts(arguments.text)
        trace = record(arguments.model, texts, arguments.limit, arguments.ctx, arguments.budget_mb, arguments.threads)
        write_trace(arguments.out, trace)
        uses = layer_use(trace)
        if not uses:
            raise BmoeError(f"{arguments.text}: no token to route; give a text")
        if arguments.plot:
            plot(uses, f"Use of experts: {trace.model}, {uses[0].tokens} tokens", arguments.plot)
    except (BmoeError, OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"model": trace.model, "trace": str(arguments.out), "layers": [as_dict(u) for u in uses]}))
    else:
        print(table(uses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
