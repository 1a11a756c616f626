"""How good the predictions of ``bmoe fit`` are: each made anew and then held against a run of the same profile.

    python benchmarks/fit.py [--rounds N] [--json] [--plot FILE] [--only NAME ...]

The models are the bundled one, and cut-down ``qwen3-30b-a3b`` and ``gpt-oss-120b`` shapes with random weights. Those
route at random: their hit rate is no matter of a reference curve, so one run before the first round says what to give
as ``--hit-rate``. For the bundled model hit rates are predicted like all else. Cases take turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import model_file
from pairs import quartiles
from report import Bar, Plot, publish

from bmoe.synth import write_model

ONE = ("--set", "model.threads=1")


@dataclass(frozen=True)
class Case:
    """A name, which model, and what ``bmoe fit`` is told beside it; ``given`` tells whether a hit rate is."""

    name: str
    model: str
    arguments: tuple[str, ...] = ()
    given: bool = True


CASES = (
    Case("bmoe-ref, resident", "bmoe-ref", (), given=False),
    Case("bmoe-ref, resident, 1 thread", "bmoe-ref", ONE, given=False),
    Case("bmoe-ref, a third cached", "bmoe-ref", ("--profile", "demo"), given=False),
    Case("bmoe-ref, a third cached, 1 thread", "bmoe-ref", ("--profile", "demo", *ONE), given=False),
    Case(
        "bmoe-ref, 0.7 cached, 1 thread",
        "bmoe-ref",
        ("--profile", "demo", *ONE, "--set", "cache.budget_mb=14"),
        given=False,
    ),
    Case("qwen3-30b-a3b, resident", "qwen3"),
    Case("qwen3-30b-a3b, resident, 1 thread", "qwen3", ONE),
    Case("qwen3-30b-a3b, 3 GB", "qwen3", ("--memory", "3GB")),
    Case("qwen3-30b-a3b, 2 GB, 1 thread", "qwen3", ("--memory", "2GB", *ONE)),
    Case("qwen3-30b-a3b, 1.3 GB, 1 thread", "qwen3", ("--memory", "1.3GB", *ONE)),
    Case("gpt-oss-120b, resident, 1 thread", "gpt-oss", ONE),
    Case("gpt-oss-120b, 4 GB, 1 thread", "gpt-oss", ("--memory", "4GB", *ONE)),
    Case("gpt-oss-120b, 3 GB, 1 thread", "gpt-oss", ("--memory", "3GB", *ONE)),
)


def files(folder: str | None) -> dict[str, str]:
    """The models by their short names; made if they are not there."""
    directory = Path(folder or Path(tempfile.gettempdir()) / "bmoe-benchmarks")
    qwen3, gpt = model_file(8, str(directory)), directory / "gpt-oss-120b-2.gguf"
    if not gpt.exists():
        write_model(gpt, "gpt-oss-120b", layers=2)
    return {"bmoe-ref": "bmoe-ref", "qwen3": qwen3, "gpt-oss": str(gpt)}


def fit(model: str, *arguments: str) -> dict[str, Any]:
    """What ``bmoe fit --run --json`` says."""
    command = [sys.executable, "-m", "bmoe.cli", "fit", model, *arguments, "--run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def summed(case: Case, told: list[dict[str, Any]]) -> dict[str, Any]:
    """A case's row: how many of its ranges held what was measured, and measured over the middle of the range."""
    measured = [each["measured"]["tok_s"] for each in told]
    ranges = [(each["tok_s_low"], each["tok_s_high"]) for each in told]
    return {
        "case": case.name,
        "runs": len(told),
        "inside": sum(low <= tok_s <= high for tok_s, (low, high) in zip(measured, ranges, strict=True)),
        "ratio": quartiles([t / (low * high) ** 0.5 for t, (low, high) in zip(measured, ranges, strict=True)]),
        "tok_s": quartiles(measured),
        "low": quartiles([low for low, _ in ranges])[1],
        "high": quartiles([high for _, high in ranges])[1],
        "widest": max(high / low for low, high in ranges),
        "hit_rate": [told[0]["hit_rate"]["expected"], told[0]["measured"]["hit_rate"]],
        "budget_bytes": told[0]["budget_bytes"],
    }


def main() -> None:
    """Parse, predict and measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="predictions of each case")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose names begin like this")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures, as a .png or .svg file")
    parser.add_argument("--folder", help="where made models are kept (default: a temporary folder)")
    arguments = parser.parse_args()
    cases = [c for c in CASES if not arguments.only or c.name.startswith(tuple(arguments.only))]
    if not cases or arguments.rounds < 1:
        parser.error("no case or no round is left; see --help")
    only_bundled = all(case.model == "bmoe-ref" for case in cases)
    paths = {"bmoe-ref": "bmoe-ref"} if only_bundled else files(arguments.folder)
    rates = {c.name: fit(paths[c.model], *c.arguments)["measured"]["hit_rate"] for c in cases if c.given}
    told: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    for _ in range(arguments.rounds):
        for case in cases:
            rate = rates.get(case.name)
            more = () if rate is None else ("--hit-rate", str(rate))
            told[case.name].append(fit(paths[case.model], *case.arguments, *more))
    rows = [summed(case, told[case.name]) for case in cases]
    inside, runs = sum(row["inside"] for row in rows), sum(row["runs"] for row in rows)
    result = {"benchmark": "fit", "rounds": arguments.rounds, "rows": rows, "inside": inside, "runs": runs}
    lines = [
        f"{row['case']}: {row['inside']} of {row['runs']} inside; predicted {row['low']:.3g} to {row['high']:.3g}, "
        f"measured {row['tok_s'][1]:.3g} ({row['tok_s'][0]:.3g}-{row['tok_s'][2]:.3g}) tok/s; "
        f"measured / middle {row['ratio'][1]:.2f} ({row['ratio'][0]:.2f}-{row['ratio'][2]:.2f})"
        for row in rows
    ]
    bars = [Bar(row["case"], *row["ratio"]) for row in rows]
    plot = Plot("Measured over the middle of the predicted range", "ratio, with quartiles", bars, 1.0)
    publish(result, arguments, [*lines, f"all: {inside} of {runs} inside"], plot)


if __name__ == "__main__":
    main()
