"""How often the drafts of a model's head for next-token prediction would be accepted, position by position, on a text.

At every token of the text the head drafts what may follow, and the trunk says what it would have chosen: a draft is
accepted if it is the trunk's likeliest token and every draft before it was accepted. The text itself is then fed, right
or wrong, so that all contexts are given ones. Of a .jsonl file the "text" of every line is a text of its own.

Example: .venv/bin/python scripts/measure_mtp.py model.gguf held-out.txt --positions 3 --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bmoe.errors import BmoeError
from bmoe.native.model import ContextOptions
from bmoe.native.mtp import Head
from bmoe.resolve import resolve


class Acceptance:
    """Per position from 1: drafts ``tried`` (all before them were accepted) and those ``accepted``, at ``contexts``."""

    def __init__(self, positions: int) -> None:
        self.tried, self.accepted = [0] * positions, [0] * positions
        self.contexts = 0

    def add(self, right: int) -> None:
        """Count one chain, of which the first ``right`` drafts were accepted."""
        self.contexts += 1
        for position in range(min(right + 1, len(self.tried))):
            self.tried[position] += 1
            self.accepted[position] += position < right

    def as_dict(self) -> dict[str, Any]:
        """For JSON. ``acceptance`` is of those tried, ``reach`` of all contexts; a cycle is one decode of the trunk."""
        rows = [
            {
                "position": index + 1,
                "n": tried,
                "accepted": accepted,
                "acceptance": accepted / tried if tried else None,
                "reach": accepted / self.contexts if self.contexts else None,
            }
            for index, (tried, accepted) in enumerate(zip(self.tried, self.accepted, strict=True))
        ]
        cycle = 1 + sum(self.accepted) / self.contexts if self.contexts else None
        return {"contexts": self.contexts, "tokens_per_cycle": cycle, "positions": rows}


def measure(head: Head, texts: Iterable[Sequence[int]], positions: int, limit: int, ctx: int) -> Acceptance:
    """Draft ``positions`` tokens at up to ``limit`` places of token lists, each cut into windows of ``ctx``."""
    found = Acceptance(positions)
    for window in _windows(texts, ctx - positions - 1):
        head.clear()
        head.feed(window[:1])  # without a token before, the head has no hidden state to go by
        for token in window[1:]:
            if found.contexts >= limit:
                return found
            drafts, _ = head.draft(token, positions)
            chosen = head.verify([token, *drafts[:-1]]).argmax(-1)
            found.add(next((i for i, draft in enumerate(drafts) if draft != chosen[i]), positions))
            head.feed([token])
    return found


def _windows(texts: Iterable[Sequence[int]], size: int) -> Iterator[Sequence[int]]:
    for tokens in texts:
        yield from (tokens[start : start + size] for start in range(0, len(tokens), size))


def read_texts(path: Path) -> list[str]:
    """The texts of a file: the whole of it, or of a .jsonl file the "text" of every line."""
    data = path.read_text("utf-8")
    if path.suffix != ".jsonl":
        return [data]
    return [json.loads(line)["text"] for line in data.splitlines() if line.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a gguf with its head for next-token prediction")
    parser.add_argument("text", type=Path, help="held-out text, or a .jsonl file of texts")
    parser.add_argument("--positions", type=int, default=3, help="drafts in a chain (default 3)")
    parser.add_argument("--limit", type=int, default=2000, help="contexts at most (default 2000)")
    parser.add_argument("--ctx", type=int, default=512, help="tokens of a window (default 512)")
    parser.add_argument("--threads", type=int, help="threads of llama.cpp (default: as the profile resident has)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.positions <= 16 or arguments.ctx < 32:
        parser.error("--positions must be 1 to 16 and --ctx at least 32")
    try:
        plan = resolve("resident", model=arguments.model)
        threads = arguments.threads or plan.threads
        options = ContextOptions(arguments.ctx, 32, threads, kv_type="f32", flash_attention=False)
        with Head(plan.facts, options) as head:
            texts = [head.model.tokenize(text) for text in read_texts(arguments.text)]
            found = measure(head, texts, arguments.positions, arguments.limit, arguments.ctx)
    except (BmoeError, OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = {"model": arguments.model, "text": str(arguments.text), **found.as_dict()}
    print(json.dumps(result, indent=2) if arguments.json else _table(result))
    return 0


def _table(result: dict[str, Any]) -> str:
    if not result["contexts"]:
        return "no context: the text has fewer than two tokens"
    lines = [f"{'position':>8} {'n':>7} {'accepted':>8} {'acceptance':>10} {'reach':>6}"]
    for row in result["positions"]:
        share = "-" if row["acceptance"] is None else f"{row['acceptance']:.3f}"
        lines.append(f"{row['position']:>8} {row['n']:>7} {row['accepted']:>8} {share:>10} {row['reach']:>6.3f}")
    lines.append(f"{result['tokens_per_cycle']:.2f} tokens per decode of the trunk, {result['contexts']} contexts")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
