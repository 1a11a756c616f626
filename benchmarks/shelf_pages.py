"""Writes the price list as pages: one per plugin, an index, and a plot of bytes against quality. Nothing is typed.

What a plugin does and its source are its module's own words, options are its schema, figures are from the results file.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bmoe.bundled import find_model
from bmoe.cli.plugins import list_providers
from bmoe.layout import read_model
from bmoe.plugins import load_all
from bmoe.registry import load_registry

KINDS = {
    "cache": "cache policy",
    "prefetch": "prefetcher",
    "routing": "routing policy",
    "importance": "importance scorer",
    "draft": "drafter",
    "fetch": "fetcher",
    "dense": "dense placement",
    "sink": "sink",
}
SETTINGS = {
    "cache": 'cache.policy = "{}"',
    "prefetch": '[prefetch] policy = "{}"',
    "routing": '[[routing]] plugin = "{}"',
    "importance": '[[routing]] options.importance = "{}"',
    "draft": '[draft] drafter = "{}"',
    "fetch": 'fetch.plugin = "{}"',
    "dense": 'dense.placement = "{}"',
    "sink": '[[sink]] plugin = "{}"',
}
TRACES = "recorded with 6 (qwen, gemma) and 2 (gptoss) experts per token; the models' own numbers are 8, 8 and 4"


def write_pages(prices: Mapping[str, Any], folder: Path) -> None:
    """Write every page and the plot into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages(prices).items():
        (folder / name).write_text(text, encoding="utf-8")
    _plot(prices, folder / "pareto.svg")


def pages(prices: Mapping[str, Any]) -> dict[str, str]:
    """The text of each page, by file name."""
    catalog = load_all(load_registry())
    providers = [p for p in list_providers(catalog) if p["kind"] in KINDS]
    modules = {(row.kind, row.name): row.module for row in load_registry().rows}
    model = read_model(find_model(prices["settings"]["model"]), catalog.archs)
    made = {}
    for p in providers:
        kind, name = p["kind"], p["name"]
        neutral = catalog.providers[kind][name].neutral
        page = _page(p, modules[kind, name], neutral(model) if neutral else None, prices)
        made[f"{kind}-{name}.md"] = page
    return {"index.md": _index(providers, prices), "loss.md": _loss(prices), **made}


def _page(
    provider: Mapping[str, Any], module: str, neutral: Mapping[str, Any] | None, prices: Mapping[str, Any]
) -> str:
    kind, name = provider["kind"], provider["name"]
    lines = [f"# `{name}`", "", f"A {KINDS[kind]}: `{SETTINGS[kind].format(name)}`.", "", *_docstring(module), ""]
    marks = []
    if provider["lossy"]:
        marks.append("It is lossy: it may change the output, and every run record says so.")
    elif kind == "draft":
        marks.append("It is lossless: the model itself chooses every token.")
    elif kind in ("cache", "prefetch"):
        marks.append("It is lossless: the output is that of the resident model, byte for byte.")
    if provider["experimental"]:
        marks.append("It is experimental: it needs `plugins.allow_experimental = true`.")
    if neutral:
        said = ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in neutral.items())
        marks.append(f"Neutral for the reference model: {said}; its output is then the resident one, byte for byte.")
    marks += [
        f"{word.capitalize()}: {', '.join(f'`{each}`' for each in provider[word])}."
        for word in ("needs", "excludes")
        if provider[word]
    ]
    lines += [line for mark in marks for line in (mark, "")]
    lines += ["## Options", "", *_options(provider["options"]), ""]
    cases = [case for case in prices["cases"].values() if (case["kind"], case["plugin"]) == (kind, name)]
    lines += list(_prices(cases, prices))
    if kind == "cache":
        lines += list(_replays(name, prices))
    return "\n".join(lines).rstrip() + "\n"


def _docstring(module: str) -> list[str]:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return text.replace("``", "`").splitlines()


def _options(schema: Mapping[str, Any]) -> Iterator[str]:
    if not schema:
        yield "None."
        return
    yield "| option | default | meaning |"
    yield "|---|---|---|"
    for name, field in schema.items():
        default = f"`{field['default']!r}`" if "default" in field else "required"
        yield f"| `{name}` | {default.replace(chr(39), chr(34))} | {field.get('description', '')} |"


def _prices(cases: Sequence[Mapping[str, Any]], prices: Mapping[str, Any]) -> Iterator[str]:
    if not cases:
        return
    settings = prices["settings"]
    yield "## On the reference model"
    yield ""
    budgets = [f"{budget:g}" for budget in settings["budgets_mb"]]
    decode, prompt = ([c for c in cases if bool(c["prompt"]) is which] for which in (False, True))
    if decode:
        head = [f"hits, {b} MiB | MiB/token, {b} MiB" for b in budgets]
        yield f"| setting | {' | '.join(head)} | tok/s ratio |"
        yield "|---|" + "---|" * (2 * len(budgets) + 1)
        for case in decode:
            cells = []
            for budget in budgets:
                found = case["budgets"][budget]
                cells.append(_share(found["hit_rate"]))
                cells.append(_figure(found["mib_per_token"]))
            yield f"| {case['label']} | {' | '.join(cells)} | {_speed(case)} |"
        yield ""
    if prompt:
        head = [f"MiB per prompt token, {b} MiB" for b in budgets]
        yield f"| setting | {' | '.join(head)} |"
        yield "|---|" + "---|" * len(budgets)
        for case in prompt:
            yield f"| {case['label']} | {' | '.join(_figure(case['budgets'][b]['mib_per_token']) for b in budgets)} |"
        yield ""
    if any(case["lossy"] for case in cases):
        yield from _quality([case for case in cases if case["lossy"]], prices)
    yield _measured(cases)


def _quality(cases: Sequence[Mapping[str, Any]], prices: Mapping[str, Any]) -> Iterator[str]:
    middle = f"{prices['settings']['middle_mb']:g}"
    resident = prices["resident"]["arithmetic"]
    yield f"Quality with a cache of {middle} MiB, against the resident model on the same tokens:"
    yield ""
    yield "| setting | perplexity ratio | KL, nats | same best token | arithmetic | mass lost: mean | worst token |"
    yield "|---|---|---|---|---|---|---|"
    for case in cases:
        found = case["budgets"][middle]
        cells = (
            _figure(found["perplexity_ratio"], 4),
            _figure(found["kl"], 4),
            _share(found["agreement"]),
            _share(case["arithmetic"]),
            _percent(found["lost_mass"]),
            _percent(found["worst_lost_mass"]),
        )
        yield f"| {case['label']} | {' | '.join(cells)} |"
    yield ""
    yield f"The resident model solves {_share(resident)} of the arithmetic."
    yield ""


def _measured(cases: Sequence[Mapping[str, Any]]) -> str:
    base = cases[0]["budgets"]
    counts = ", ".join(f"{found['tokens']} tokens at {budget} MiB" for budget, found in base.items())
    return (
        "Measured by `python benchmarks/shelf.py measure`, token by token on held-out texts "
        f"({counts}); in brackets 95 % bootstrap intervals over texts, of speed the quartiles. "
        'Prefetchers and routing policies run with `cache.policy = "next-use"`; '
        "speed is against `lru` with nothing else."
    )


def _replays(name: str, prices: Mapping[str, Any]) -> Iterator[str]:
    traces = {trace: found[name] for trace, found in sorted(prices["traces"].items()) if name in found}
    if not traces:
        return
    budgets = list(next(iter(traces.values())))
    yield "\n## On published traces"
    yield ""
    yield f"| trace | {' | '.join(f'hits, {b} MiB | MiB/token, {b} MiB' for b in budgets)} |"
    yield "|---|" + "---|" * (2 * len(budgets))
    for trace, found in traces.items():
        cells = [f"{100 * found[b]['hit_rate']:.1f} % | {found[b]['mib_per_token']:.1f}" for b in budgets]
        yield f"| {trace} | {' | '.join(cells)} |"
    yield ""
    yield f"Replayed exactly. The traces were {TRACES}."


def _index(providers: Sequence[Mapping[str, Any]], prices: Mapping[str, Any]) -> str:
    lines = ["# The price list", ""]
    lines += [
        "A page per plugin: what it does, where it is from, its options, and what it was measured to save and cost."
    ]
    lines += ["Pages and figures are written by `python benchmarks/shelf.py`; nothing on them is typed.", ""]
    for kind, noun in KINDS.items():
        found = [p for p in providers if p["kind"] == kind]
        if found:
            lines += [
                f"## {noun[0].upper()}{noun[1:]}s"
                if not noun.endswith("y")
                else f"## {noun[0].upper()}{noun[1:-1]}ies",
                "",
            ]
            lines += [f"- [`{p['name']}`]({kind}-{p['name']}.md): {p['summary'] or KINDS[kind]}" for p in found]
            lines += [""]
    lines += ["## All together", "", "- [One loss budget](loss.md) over several routing policies", ""]
    lines += ["![Bytes per token against perplexity, for every lossy setting](pareto.svg)", ""]
    lines += list(_best(prices))
    return "\n".join(lines).rstrip() + "\n"


def _best(prices: Mapping[str, Any]) -> Iterator[str]:
    """The settings that nothing beats in both, and the one that halves the bytes."""
    points = sorted(_points(prices), key=lambda point: point[1])
    if not points:
        return
    middle = f"{prices['settings']['middle_mb']:g}"
    base = next(c for c in prices["cases"].values() if (c["kind"], c["plugin"]) == ("cache", "lru"))
    plain = base["budgets"][middle]["mib_per_token"]["value"]
    yield f"Settings that no other beats in both, with a cache of {middle} MiB (`lru` reads {plain:.3f} MiB per token):"
    yield ""
    yield "| plugin | setting | MiB/token | of `lru`'s | perplexity ratio |"
    yield "|---|---|---|---|---|"
    best = float("inf")
    for case, mib, ratio in points:
        if ratio["value"] < best:
            best = ratio["value"]
            page = "loss.md" if case["plugin"] == "loss" else f"{case['kind']}-{case['plugin']}.md"
            label = f"[`{case['plugin']}`]({page}) | {case['label']}"
            yield f"| {label} | {mib:.3f} | {100 * mib / plain:.0f} % | {_figure(ratio, 4)} |"


def _loss(prices: Mapping[str, Any]) -> str:
    cases = [case for case in prices["cases"].values() if case["plugin"] == "loss"]
    lines = [
        "# One loss budget",
        "",
        "`[loss] budget = 0.02` bounds what all routing policies together may give up.",
        "",
    ]
    spec = importlib.util.find_spec("bmoe.loss")
    assert spec is not None
    lines += [*_docstring("bmoe.loss"), ""]
    lines += ["Without a budget each policy does what its options say. With one, what they do is a proposal."]
    lines += ["Telemetry has the live loss: `lost_mass` of every token, `worst_lost_mass` in the summary.", ""]
    lines += list(_prices(cases, prices))
    return "\n".join(lines).rstrip() + "\n"


def _points(prices: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], float, Mapping[str, float]]]:
    middle = f"{prices['settings']['middle_mb']:g}"
    for case in prices["cases"].values():
        if not case["prompt"] and (case["lossy"] or case["kind"] == "cache"):
            found = case["budgets"][middle]
            yield case, found["mib_per_token"]["value"], found["perplexity_ratio"]


def _plot(prices: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.add_subplot()
    groups: dict[str, list[tuple[float, float, float, float]]] = {}
    for case, mib, ratio in _points(prices):
        variant = case["label"].partition(",")[0] if case["label"].startswith("variant") else ""
        name = {"loss": "loss budget", "lru": "cache lru", "next-use": "cache next-use"}.get(
            case["plugin"], case["plugin"]
        )
        if case["kind"] == "cache" and case["plugin"] not in ("lru", "next-use"):
            continue
        cost = [100 * (ratio[key] - 1) for key in ("value", "low", "high")]
        groups.setdefault(f"{name} {variant.partition('= ')[2]}".strip(), []).append((mib, *cost))
    for index, (name, points) in enumerate(groups.items()):
        points.sort()
        x, y = [p[0] for p in points], [p[1] for p in points]
        spread = [[p[1] - p[2] for p in points], [p[3] - p[1] for p in points]]
        marker = "osD^vP*X<>h"[index % 11]
        axes.errorbar(x, y, yerr=spread, marker=marker, capsize=2, linewidth=1, markersize=6, label=name)
    axes.set_xlabel("MiB read per token")
    axes.set_ylabel("perplexity above the resident model's, %")
    axes.axhline(2, color="#cc3311", linestyle="--", linewidth=1)
    axes.annotate("2 %", (axes.get_xlim()[1], 2), (-24, 4), textcoords="offset points", color="#cc3311")
    axes.set_title(f"{prices['settings']['model']}, cache of {prices['settings']['middle_mb']:g} MiB", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def _speed(case: Mapping[str, Any]) -> str:
    base = case["plugin"] == "lru"
    return _figure(case["speed"], 2) if "speed" in case else "1" if base else "not measured"


def _figure(found: Mapping[str, float], digits: int = 3) -> str:
    value = f"{found['value']:.{digits}f}"
    return f"{value} [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"


def _share(found: Mapping[str, float]) -> str:
    return f"{100 * found['value']:.1f} % [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"
