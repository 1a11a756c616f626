"""What a heat file is worth: the hit rate of the first tokens of a run, with and without what earlier runs used.

    python benchmarks/heat.py [--model MODEL] [--texts FILE] [--prompts N] [--prompt-tokens N,N] [--policy NAME]
                              [--budget-mb N] [--json]

Other texts are continued first, in runs of their own, and their use counts are kept. Then each prompt is continued
twice in a fresh engine, without the file and with a copy of it, with a cache for half of the experts, and the look-ups
of its first decoded tokens are compared. Texts are sampled with a seed, the same for both sides.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import bmoe
from bmoe.bundled import find_model


def run(model: str, text: str, length: int, tokens: int, settings: list[str]) -> tuple[int, int, Any]:
    """Hits and look-ups of up to ``tokens`` tokens after the prompt, and the summary."""
    table = {"model": {"threads": 1, "ctx": 512, "ubatch": 64}, "sampling": {"temp": 0.8, "seed": 1}}
    with bmoe.open(table, model, settings) as engine, engine.conversation() as conversation:
        prompt = engine.model.tokenize(text)[:length]
        list(conversation.generate(prompt, tokens + 1, hash_logits=True))
        summary = conversation.summary
        return summary.hits, summary.lookups, summary


def main() -> None:
    """Warm, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bmoe-ref")
    parser.add_argument("--texts", type=Path, help="lines of JSON with a text each (what comes with bmoe-ref)")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", default="4,8,32")
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--policy", default="next-use")
    parser.add_argument("--budget-mb", type=float, help="half of the experts")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    source = given.texts or Path(find_model("bmoe-ref")).parent / "heldout.jsonl"
    texts = [json.loads(line)["text"] for line in source.read_text("utf-8").splitlines()]
    step = max(1, len(texts) // (2 * given.prompts))
    learned, asked = texts[:: 2 * step][: given.prompts], texts[step :: 2 * step][: given.prompts]
    with bmoe.open({"model": {"threads": 1}}, given.model) as engine:
        half = given.budget_mb or engine.facts.expert_bytes / 2 / (1 << 20)
    common = [f"cache.budget_mb={half:.2f}", f"cache.policy={given.policy}"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kept, copy = Path(folder) / "heat.json", Path(folder) / "copy.json"
        for text in learned:
            run(given.model, text, 16, 200, [*common, f'cache.heat="{kept}"'])
        for length in map(int, given.prompt_tokens.split(",")):
            sums = [[0, 0], [0, 0]]
            read = [0, 0]
            preloaded = 0
            for text in asked:
                shutil.copy(kept, copy)
                sides = [
                    run(given.model, text, length, given.tokens, [*common, *more])
                    for more in ([], [f'cache.heat="{copy}"'])
                ]
                assert sides[0][2].logits_sha256 == sides[1][2].logits_sha256, "the output differs"
                for side, (hits, lookups, summary) in enumerate(sides):
                    sums[side][0] += hits
                    sums[side][1] += lookups
                    read[side] += summary.bytes_read
                preloaded = sides[1][2].preloaded_bytes
            rows.append(
                {
                    "prompt_tokens": length,
                    "lookups": sums[0][1],
                    "cold": sums[0][0] / sums[0][1],
                    "warm": sums[1][0] / sums[1][1],
                    "cold_read_mib": read[0] / len(asked) / (1 << 20),
                    "warm_read_mib": read[1] / len(asked) / (1 << 20),
                    "preloaded_mib": preloaded / (1 << 20),
                }
            )
    if given.json:
        print(json.dumps({"policy": given.policy, "budget_mb": half, "prompts": len(asked), "rows": rows}))
        return
    print(f"{given.policy}, {half:.2f} MiB, {len(asked)} prompts; hit rate of the first {given.tokens} tokens")
    for row in rows:
        rates = f"cold {100 * row['cold']:.1f} %, warm {100 * row['warm']:.1f} %"
        read = f"{row['cold_read_mib']:.1f} and {row['warm_read_mib']:.1f} MiB"
        print(f"  prompt of {row['prompt_tokens']:3}: {rates}; read {read}, {row['preloaded_mib']:.1f} preloaded")


if __name__ == "__main__":
    main()
