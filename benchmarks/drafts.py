"""What drafts are worth on the reference model: time, bytes and acceptance by drafter and kind of text.

    python benchmarks/drafts.py speed [--budget-mb MIB] [--rounds N] [--tokens N] [--only DRAFTER,…] [--json]
    python benchmarks/drafts.py accepted …      what is accepted at each place, with drafts of a fixed length
    python benchmarks/drafts.py heard …         the cache hears of accepted tokens alone, or of all
    python benchmarks/drafts.py budgets …       routing policy moe-spec in verify decodes: bytes against perplexity

``speed``: a model without drafts and one for each drafter are opened beside each other. For each kind of held-out text
every one continues the same prompts, another prompt in each round, in another order each time; the first round warms
them. ``speed`` = seconds per token without / with, of the same round: above 1 is faster. In brackets are 95 % bootstrap
intervals over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drafts_measure import DRAFTERS, Run, budgets, generate, open_drafting
from pairs import compare, quartiles
from report import machine

from bmoe.bundled import find_model
from bmoe.conversation import Conversation

MODEL = "bmoe-ref"
Runs = tuple[str, dict[str, list[Run]]]
"""A source of text, and the runs of each side."""
PROMPT_TOKENS = 32


def texts_by_source() -> dict[str, list[str]]:
    """Held-out texts that are long enough to go on from, by their source."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in (Path(find_model(MODEL)).parent / "heldout.jsonl").read_text("utf-8").splitlines():
        item = json.loads(line)
        if len(item["text"]) >= 120:
            found[item["source"]].append(item["text"])
    return found


def in_turn(given: argparse.Namespace, governor: str, sides: Mapping[str, Mapping[str, Any]]) -> Iterator[Runs]:
    """For each source and side the runs of all rounds but the first. A text that soon ends is passed over."""
    with contextlib.ExitStack() as stack:
        talks: dict[str, Conversation] = {}
        for name, settings in sides.items():
            engine = open_drafting(settings, given.budget_mb, governor, given.max_draft)
            talks[name] = stack.enter_context(stack.enter_context(engine).conversation())
        names = list(talks)
        for source, texts in texts_by_source().items():
            runs: dict[str, list[Run]] = {name: [] for name in names}
            for index, text in enumerate(texts):
                order = names[index % len(names) :] + names[: index % len(names)]
                prompt = engine.model.tokenize(text)[:PROMPT_TOKENS]
                order = order if index % 2 else order[::-1]
                made = {name: generate(talks[name], prompt, given.tokens) for name in order}
                if all(made.values()):
                    for name, run in made.items():
                        runs[name] += [run] if run is not None else []
                if len(runs[names[0]]) > given.rounds:
                    yield source, {name: found[1:] for name, found in runs.items()}
                    break


def speed(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of ``speed``: one per source and drafter."""
    sides = {"none": {}, **{name: DRAFTERS[name] for name in given.only}}
    rows = []
    for source, runs in in_turn(given, "auto", sides):
        for name in given.only:
            ratio = compare([r.s_per_token for r in runs["none"]], [r.s_per_token for r in runs[name]])
            size = compare([r.bytes_per_token for r in runs[name]], [r.bytes_per_token for r in runs["none"]])
            rows.append(
                {
                    "source": source,
                    "drafter": name,
                    "speed": (ratio.ratio, ratio.low, ratio.high),
                    "ms": 1e3 * ratio.second[1],
                    "bytes": (size.ratio, size.low, size.high),
                    **_accepted(runs[name]),
                    "off": sum(r.off for r in runs[name]) / max(1, sum(r.decodes for r in runs[name])),
                }
            )
    return rows


def accepted(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of ``accepted``: one per source and drafter, with drafts as long as they may be."""
    sides = {"none": {}, **{name: DRAFTERS[name] for name in given.only}}
    rows = []
    for source, runs in in_turn(given, "fixed", sides):
        plain = quartiles([r.bytes_per_token for r in runs["none"]])[1]
        for name in given.only:
            size = compare([r.bytes_per_token for r in runs[name]], [r.bytes_per_token for r in runs["none"]])
            rows.append(
                {
                    "source": source,
                    "drafter": name,
                    **_accepted(runs[name]),
                    "places": [_places(runs[name], place) for place in range(given.max_draft)],
                    "mib": size.first[1] / (1 << 20),
                    "plain_mib": plain / (1 << 20),
                    "bytes": (size.ratio, size.low, size.high),
                }
            )
    return rows


def heard(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of ``heard``: bytes per output token where the cache hears of rejected tokens too, over the other way."""
    sides = {}
    for name in given.only:
        sides[name] = DRAFTERS[name]
        sides[f"{name}, all"] = {**DRAFTERS[name], "hears_all": True}
    rows = []
    for source, runs in in_turn(given, "fixed", sides):
        for name in given.only:
            size = compare([r.bytes_per_token for r in runs[f"{name}, all"]], [r.bytes_per_token for r in runs[name]])
            rows.append(
                {
                    "source": source,
                    "drafter": name,
                    **_accepted(runs[name]),
                    "mib": size.second[1] / (1 << 20),
                    "bytes": (size.ratio, size.low, size.high),
                }
            )
    return rows


def _accepted(runs: Sequence[Run]) -> dict[str, Any]:
    rounds = sum(r.rounds for r in runs)
    tokens = sum(r.accepted for r in runs)
    return {"accepted_length": (tokens + rounds) / rounds if rounds else None, "rounds": rounds}


def _places(runs: Sequence[Run], place: int) -> float | None:
    reached = sum(r.reached[place] for r in runs if place < len(r.reached))
    right = sum(r.right[place] for r in runs if place < len(r.right))
    return right / reached if reached else None


def _show(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A Markdown table of rows that have the same keys."""
    names = list(rows[0])
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for row in rows:
        yield f"| {' | '.join(_cell(row[name]) for name in names)} |"


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]"
    if isinstance(value, list):
        return " ".join(_cell(each) for each in value)
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "accepted", "heard", "budgets"))
    parser.add_argument("--budget-mb", type=float, default=6.4, help="MiB for experts; a third is 6.4")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-draft", type=int, default=4)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(DRAFTERS), help="drafters")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.rounds < 2 or given.tokens < 2 or not 1 <= given.max_draft <= 63:
        parser.error("--rounds and --tokens have to be 2 or more, --max-draft 1 to 63")
    if unknown := set(given.only) - set(DRAFTERS):
        parser.error(f"--only {', '.join(sorted(unknown))}: no drafter; there are {', '.join(DRAFTERS)}")
    measured = {"speed": speed, "accepted": accepted, "heard": heard, "budgets": budgets}[given.what](given)
    if given.json:
        settings = {"what": given.what, "budget_mib": given.budget_mb, "rounds": given.rounds, "tokens": given.tokens}
        print(json.dumps({"benchmark": "drafts", **settings, "rows": measured, "machine": machine()}))
        return
    print("\n".join(_show(measured)))


if __name__ == "__main__":
    main()
