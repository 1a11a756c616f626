"""The price list: what each plugin saves and costs on the reference model and on published traces.

    python benchmarks/shelf.py measure [--out docs/plugins/prices.json] [--quick] [--only TEXT]
    python benchmarks/shelf.py pages [--prices docs/plugins/prices.json] [--out docs/plugins]

``measure`` decodes the held-out texts token by token under every setting of ``shelf_cases.py``, beside what the
resident model says of them, and replays routing traces (``--traces``) under every cache policy; it takes about an hour.
``--only`` measures the settings whose name contains TEXT again and keeps the others. ``pages`` writes a page per plugin
and the plot. Nothing on those pages is typed. Speed is only worth something on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shelf_measure as measure
from shelf_cases import BASE, BUDGETS_MB, CACHES, CASES, MIDDLE, Case
from shelf_pages import write_pages

from bmoe.bundled import find_set
from bmoe.errors import PluginError
from bmoe.evaluate.datasets import Problem, read_dataset
from bmoe.replay.contender import Contender
from bmoe.replay.read_lookups import read_lookups

DOCS = Path(__file__).parent.parent / "docs" / "plugins"
TRACE_BUDGETS_MIB = (500, 2000, 4000)
PROMPT = 96


def main() -> None:
    """Parse and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "pages"])
    parser.add_argument("--prices", type=Path, default=DOCS / "prices.json", help="the file of results")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the pages")
    parser.add_argument("--traces", type=Path, nargs="*", default=[], help="routing traces to replay cache policies on")
    parser.add_argument("--documents", type=int, default=60, help="held-out texts at the middle budget")
    parser.add_argument("--few", type=int, default=20, help="held-out texts at the other budgets")
    parser.add_argument("--rounds", type=int, default=9, help="turns of the comparison of speed; 0 = leave it out")
    parser.add_argument("--speed", action="store_true", help="measure the speed of what was measured, and nothing else")
    parser.add_argument("--only", default="", help="measure only settings whose name contains this")
    parser.add_argument("--quick", action="store_true", help="a few texts and rounds, to see that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.documents, arguments.few, arguments.rounds = 3, 2, min(arguments.rounds, 1)
    if arguments.what == "measure":
        measure_all(arguments)
    else:
        write_pages(json.loads(arguments.prices.read_text(encoding="utf-8")), arguments.out)


def measure_all(arguments: argparse.Namespace) -> None:
    """Measure case by case; what is done is kept after each, so that it can be interrupted."""
    prices = _begun(arguments.prices)
    prices["machine"] = {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}
    prices["settings"] = {"model": measure.MODEL, "budgets_mb": BUDGETS_MB, "middle_mb": MIDDLE, "prompt": PROMPT}
    documents = _documents(arguments.documents)
    if arguments.speed:
        documents = documents[: arguments.few]
    resident = measure.resident_rows(documents)
    few = measure.Resident(resident.documents[: arguments.few], resident.rows[: arguments.few])
    joined = list(measure.chunks([token for each in documents for token in each], 2 * PROMPT))
    prompts = measure.resident_rows([] if arguments.speed else joined)
    problems = _problems(60 if not arguments.quick else 4)
    if "resident" not in prices:
        prices["resident"] = {"arithmetic": measure.arithmetic({}, None, problems)}
    for case in CASES:
        if arguments.only not in case.key:
            continue
        print(case.key, flush=True)
        if not arguments.speed:
            prices["cases"][case.key] = _price(case, resident, few, prompts, problems)
        if arguments.rounds and not case.prompt and case.key != BASE.key:
            ids = [token for each in few.documents for token in each][:96]
            found = measure.speed(case.tables, BASE.tables, MIDDLE, ids, arguments.rounds)
            prices["cases"][case.key]["speed"] = found
        _keep(arguments.prices, prices)
    for path in arguments.traces:
        prices["traces"][path.name.partition(".")[0]] = _replayed(path)
        _keep(arguments.prices, prices)


def _price(
    case: Case,
    resident: measure.Resident,
    few: measure.Resident,
    prompts: measure.Resident,
    problems: Sequence[Problem],
) -> dict[str, Any]:
    made: dict[str, Any] = {"kind": case.kind, "plugin": case.plugin, "label": case.label}
    made |= {"tables": dict(case.tables), "lossy": case.lossy, "prompt": case.prompt, "budgets": {}}
    for budget in BUDGETS_MB:
        if case.prompt:
            made["budgets"][f"{budget:g}"] = measure.prompt_price(case.tables, budget, prompts, PROMPT)
        else:
            texts = resident if budget == MIDDLE else few
            made["budgets"][f"{budget:g}"] = measure.decode_price(case.tables, budget, texts)
    if case.lossy:
        made["arithmetic"] = measure.arithmetic(case.tables, MIDDLE, problems)
    return made


def _replayed(path: Path) -> dict[str, Any]:
    """Hit rate and MiB per token of every cache policy, and of Belady's rule, on one trace."""
    trace = read_lookups(path)
    found: dict[str, Any] = {}
    for name in (*(case.plugin for case in CACHES), "belady"):
        contender = Contender(name, name)
        for budget in TRACE_BUDGETS_MIB:
            try:
                played = contender.play(trace, budget << 20)
            except PluginError:  # it looks at probabilities, which this trace lacks
                break
            row = {
                "hit_rate": played.hit_rate,
                "mib_per_token": played.missed_bytes / 2**20 / trace.tokens if trace.tokens else None,
            }
            found.setdefault(name, {})[str(budget)] = row
    return found


def _documents(count: int) -> list[list[int]]:
    """``count`` texts, spread evenly over the held-out set, as tokens."""
    items = read_dataset(find_set("heldout")).items
    chosen = items[:: max(1, len(items) // count)][:count]
    with measure.open_with({}, None) as engine:
        return [engine.model.tokenize(item.text)[:400] for item in chosen]


def _problems(count: int) -> list[Problem]:
    return list(read_dataset(find_set("arithmetic")).items[:count])


def _begun(path: Path) -> dict[str, Any]:
    prices: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    prices.setdefault("cases", {})
    prices.setdefault("traces", {})
    return prices


def _keep(path: Path, prices: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(prices, indent=1, default=list) + "\n", encoding="utf-8")
    os.replace(beside, path)


if __name__ == "__main__":
    main()
