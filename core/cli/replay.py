"""``bmoe replay``: what cache policies would have made of recorded routings, beside the best that was possible."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bmoe.bundled import find_model
from bmoe.cli.arguments import Parser, UsageError, choose
from bmoe.cli.folders import fetch_memory
from bmoe.cli.output import complain, emit, emit_json, emit_table
from bmoe.contracts import ModelFacts
from bmoe.errors import ProfileError
from bmoe.problems import toml_value
from bmoe.tables import parse_override

if TYPE_CHECKING:
    from bmoe.replay.contender import Contender
    from bmoe.replay.sweep import Result

EXAMPLE = "bmoe replay trace.csv --policy lru --budget-mb 500,1000,2000,4000"
_MIB = 1 << 20
_MOST_MIB = 1 << 32


def main(arguments: Sequence[str]) -> int:
    """Replay and print the rows."""
    parsed = _parser().parse(arguments)
    budgets = _budgets(parsed.budget_mb)
    if parsed.jobs < 1:
        raise UsageError(f"--jobs {parsed.jobs}: is out of range; give at least 1")

    from bmoe.replay.chart import check_chart, write_chart
    from bmoe.replay.read_lookups import read_lookups
    from bmoe.replay.sweep import CLUSTERS, sweep

    if parsed.backend is not None:
        choose(parsed.backend, CLUSTERS, "backend")
    elif parsed.cluster is not None:
        raise UsageError(
            f"--cluster {parsed.cluster}: goes with a backend; add --backend {' or --backend '.join(CLUSTERS)}"
        )
    if parsed.choose:
        return _choose(parsed, budgets)
    contenders = _contenders(parsed.policy, parsed.enable)
    if parsed.plot is not None:
        check_chart(parsed.plot, overwrite=parsed.overwrite)
    model = _facts(parsed.model, parsed.enable) if parsed.model else None
    with _waiting():
        traces = [read_lookups(path, model) for path in dict.fromkeys(parsed.traces)]
        results = sweep(
            traces,
            contenders,
            budgets,
            model=model,
            jobs=parsed.jobs,
            backend=parsed.backend,
            cluster=parsed.cluster,
            seed=parsed.seed,
        )
    if parsed.plot is not None:
        write_chart(parsed.plot, results)
    if parsed.json:
        emit_json([as_json(result) for result in results], indent=2)
    else:
        _print(results, model)
    return 0


def _choose(parsed: Any, budgets: Sequence[int]) -> int:
    """Replay what "auto" may become, print it, and remember which was best."""
    from bmoe.registry import AUTO
    from bmoe.replay.choose import candidates, check_model, choose_policy
    from bmoe.replay.read_lookups import read_lookups
    from bmoe.replay.sweep import sweep
    from bmoe.verdicts import remember_policy

    if parsed.policy or parsed.enable:
        raise UsageError("--choose: compares the policies that auto may become; leave --policy and --enable out")
    if not parsed.model:
        raise UsageError("--choose: needs --model MODEL, the model that was run, for which the choice holds")
    model, memory = _facts(parsed.model, ()), fetch_memory()
    with _waiting():
        traces = [read_lookups(path, model) for path in dict.fromkeys(parsed.traces)]
        for trace in traces:
            check_model(trace, model)
        contenders = candidates(AUTO["cache"], traces)
        results = sweep(traces, contenders, budgets, model=model, jobs=parsed.jobs, seed=parsed.seed)
    if parsed.json:
        emit_json([as_json(result) for result in results], indent=2)
    else:
        _print(results, model)
    verdict = choose_policy(results, AUTO["cache"][0], model)
    if not remember_policy(memory, model, verdict):
        where = f"{memory} cannot be written" if memory else "there is no folder for it; set XDG_CACHE_HOME"
        complain(f"--choose: {verdict.name} would be best ({verdict.why}), and is not remembered: {where}")
        return 1
    chosen = toml_value(verdict.name)
    complain(f'cache.policy = "auto" is {chosen} for {parsed.model} from now on: {verdict.why}')
    return 0


def _parser() -> Parser:
    parser = Parser(
        "bmoe replay",
        "Replay recorded routings against cache policies, exactly and without a model: hit rate and bytes per token\n"
        "at every budget, beside Belady's rule, which knows the future.",
        EXAMPLE,
    )
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="routing traces, files of route_trace v1")
    parser.add_argument(
        "--policy",
        metavar="NAME,…",
        action="append",
        help="cache policies, each NAME or NAME:KEY=VALUE:…; also belady and optimum (lru)",
    )
    parser.add_argument("--budget-mb", metavar="N,…", required=True, help="sizes of the cache in MiB")
    parser.add_argument(
        "--choose",
        action="store_true",
        help="replay all policies of bmoe, and let cache.policy = auto be the best for --model",
    )
    parser.add_argument("--enable", action="append", default=[], metavar="NAME", help="load this installed plugin too")
    parser.add_argument("--model", metavar="MODEL", help="take the sizes of experts from this model's header")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="seed of policies that draw (0)")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="processes to spread the replays over (1)")
    parser.add_argument("--backend", metavar="NAME", help="dask or ray: spread them over a cluster that you have")
    parser.add_argument("--cluster", metavar="ADDRESS", help="where its scheduler is (what the library itself finds)")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the figures: a .png, .svg or .pdf")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it is there")
    parser.add_argument("--json", action="store_true", help="print one list of rows")
    return parser


def _budgets(text: str) -> list[int]:
    """Bytes. Raises :class:`UsageError` for what is no size."""
    found = []
    for part in text.split(","):
        try:
            amount = float(part)
        except ValueError:
            amount = math.nan
        if not 0 <= amount <= _MOST_MIB:
            raise UsageError(
                f"--budget-mb {text}: {part.strip()!r} is no size; give MiB from 0 to {_MOST_MIB}, as 500,1000"
            )
        found.append(round(amount * _MIB))
    return list(dict.fromkeys(found))


def _contenders(given: Sequence[str] | None, enable: Sequence[str]) -> list[Contender]:
    """The policies that were named, and Belady's rule after them."""
    from bmoe.replay.contender import BELADY, LRU, Contender

    labels = [label.strip() for text in given or [LRU] for label in text.split(",")]
    return [Contender(label, *_policy(label), tuple(enable)).checked() for label in dict.fromkeys([*labels, BELADY])]


def _policy(label: str) -> tuple[str, dict[str, Any]]:
    """Name and options of ``NAME:KEY=VALUE:…``; values are TOML, or else text."""
    name, *parts = label.split(":")
    options: dict[str, Any] = {}
    for part in parts:
        try:
            path, value = parse_override(part)
        except ProfileError:
            path, value = (), None
        if len(path) != 1:
            raise UsageError(f"--policy {label}: {part!r} is no option; write NAME:KEY=VALUE")
        options[path[0]] = value
    return name, options


def _facts(name: str, enable: Sequence[str]) -> ModelFacts:
    from bmoe.layout import read_model
    from bmoe.plugins import load_all
    from bmoe.registry import load_registry

    return read_model(find_model(name), load_all(load_registry(), enable, "--enable").archs)


def as_json(result: Result) -> dict[str, Any]:
    """One row; what is undefined is null."""
    from bmoe.telemetry import SCHEMA

    trace = result.trace
    return {
        "schema": SCHEMA,
        "trace": trace.source,
        "policy": result.contender.label,
        "budget_mb": _mib(result.budget_bytes),
        "hit_rate": result.played.hit_rate,
        "mib_per_token": result.mib_per_token,
        "gap_closed": result.gap_closed,
        "lookups": result.played.lookups,
        "tokens": trace.tokens,
        "verified_batches": 0 if trace.drafts is None else trace.drafts.batches,
        "cycle_mib": trace.cycle_bytes / _MIB,
        "below_cycle": result.below_cycle,
        "n_expert": trace.n_expert,
        "n_used": trace.n_used,
    }


def _print(results: Sequence[Result], model: ModelFacts | None) -> None:
    for trace in {result.trace.source: result.trace for result in results}.values():
        used = f"{trace.n_used} of {trace.n_expert} experts per token"
        if model is not None and model.n_used != trace.n_used:
            used += f" (the model's own: {model.n_used})"
        counted = f"{trace.tokens} decode tokens" if trace.tokens else "decode tokens not told apart"
        if trace.drafts is not None:
            counted += f" ({trace.drafts.batches} batches verified a draft)"
        cycle = f"token cycle {trace.cycle_bytes / _MIB:.1f} MiB"
        emit(f"{_shown(trace.source)}: {_shown(trace.model) or 'no name'}, {counted}, {used}, {cycle}\n")
    emit("\n")
    emit_table(
        ("trace", "policy", "budget MiB", "hit rate %", "MiB/token", "gap closed %", ""),
        [
            (
                _shown(Path(result.trace.source).name),
                result.contender.label,
                f"{_mib(result.budget_bytes):g}",
                _figure(result.played.hit_rate, 100),
                _figure(result.mib_per_token),
                _figure(result.gap_closed, 100),
                "below the token cycle" if result.below_cycle else "",
            )
            for result in results
        ],
    )


def _figure(value: float | None, factor: int = 1) -> str:
    return "-" if value is None else f"{factor * value:.1f}"


def _mib(nbytes: int) -> float:
    return nbytes // _MIB if nbytes % _MIB == 0 else nbytes / _MIB


def _shown(text: str) -> str:
    """Text of a file as a line that no terminal acts on."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """A sign of life on a terminal; nothing elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield
        return
    with console.status("replaying"):
        yield
