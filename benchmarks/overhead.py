"""CPU time per token with every expert resident in the cache, against plain llama.cpp on the same file.

    python benchmarks/overhead.py [--quick] [--json] [--plot FILE] [--threads N]

Both run in processes of their own, opened once, and take turns. The tokens are given, and decoded once before the
measurement, so that every look-up is a hit. ``cpu_ratio`` is the median of pairwise ratios; 1.00 = streaming is free.
"""

from __future__ import annotations

from models import model_file, parser_of
from pairs import compare, interleave
from report import Bar, Plot, publish
from worker import Worker, random_tokens


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, tokens=24)
    arguments = parser.parse_args()
    tokens, threads = arguments.tokens, arguments.threads
    pairs = arguments.pairs or (9 if arguments.quick else 15)
    model = arguments.model or model_file(8 if arguments.quick else 24, arguments.folder)
    everything = f"cache.budget_mb={1 << 20}"
    with (
        Worker(model, "stream.enabled=false", threads=threads) as plain,
        Worker(model, everything, threads=threads) as streamed,
    ):
        n_vocab = plain.opened["n_vocab"]
        prompt, given = random_tokens(8, n_vocab), random_tokens(tokens, n_vocab)
        for worker in (plain, streamed):
            worker.decode(prompt, given)
        hits: list[float] = []
        walls: dict[str, list[float]] = {"plain": [], "streamed": []}
        huge: dict[str, int | None] = {}

        def measure(worker: Worker, name: str) -> float:
            cost = worker.decode(prompt, given)
            walls[name].append(cost["decode_s"] / tokens)
            huge[name] = cost["huge_bytes"]
            if name == "streamed":
                hits.append(cost["hit_rate"])
            return float(cost["cpu_s"]) / tokens

        ratio = interleave(lambda: measure(streamed, "streamed"), lambda: measure(plain, "plain"), pairs)
    wall = compare(walls["streamed"], walls["plain"]).ratio
    result = {
        "benchmark": "overhead",
        "cpu_ratio": ratio.ratio,
        "cpu_ratio_interval": [ratio.low, ratio.high],
        "wall_ratio": wall,
        "cpu_ms_streamed": [round(v * 1e3, 3) for v in ratio.first],
        "cpu_ms_plain": [round(v * 1e3, 3) for v in ratio.second],
        "hit_rate": min(hits),
        "huge_bytes": huge,
        "pairs": ratio.pairs,
        "threads": threads,
        "model": model,
    }
    if min(hits) < 1.0:
        raise SystemExit(f"not every look-up was a hit ({min(hits):.4f}): the figure would mean nothing")
    lines = [
        f"CPU per token, all experts resident / plain llama.cpp: {ratio}",
        f"  streamed {ratio.first[1] * 1e3:.2f} ms, plain {ratio.second[1] * 1e3:.2f} ms (medians); wall {wall:.3f}",
    ]
    bars = [Bar("CPU per token", ratio.low, ratio.ratio, ratio.high)]
    publish(result, arguments, lines, Plot("Every expert resident, against plain llama.cpp", "ratio", bars, 1.01))


if __name__ == "__main__":
    main()
