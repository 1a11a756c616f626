"""``bmoe eval``: what a model is worth under a profile, measured on a file of texts, questions or problems."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from bmoe.bundled import find_set
from bmoe.cli.arguments import Parser, UsageError, add_profile_arguments, choose
from bmoe.cli.folders import fetch_memory
from bmoe.cli.interrupt import Interrupt
from bmoe.cli.output import complain, emit, emit_json, emit_table
from bmoe.evaluate.datasets import KEYS, read_dataset
from bmoe.evaluate.prompts import FORMS

if TYPE_CHECKING:
    from bmoe.evaluate.run import Evaluation

EXAMPLE = "bmoe eval heldout --profile demo --limit 20"
_MIB = 1024 * 1024
_AGAINST = ("resident",)
_SHOWN_SKIPPED = 5


def main(arguments: Sequence[str]) -> int:
    """Evaluate and print the figures; what was done is printed after a Ctrl-C too."""
    parsed = _parser().parse(arguments)
    _check(parsed)

    from bmoe.evaluate.run import Evaluation, Settings
    from bmoe.resolve import resolve

    dataset = read_dataset(find_set(parsed.file), parsed.format, parsed.limit)
    names = _metrics(parsed.metric, dataset.format, paired=parsed.against is not None)
    plan = resolve(parsed.profile, model=parsed.model, overrides=parsed.overrides, remember=fetch_memory())
    out = parsed.out or f"{Path(parsed.file).stem}.replies.jsonl"
    settings = Settings(parsed.prompts, parsed.tokens, parsed.against)
    made = Evaluation(plan, dataset, settings, out=out, resume=parsed.resume, overwrite=parsed.overwrite)
    with made as evaluation, Interrupt(evaluation.cancel) as interrupt:
        with _progress(evaluation, len(dataset.items), names[0]) as (token, item):
            evaluation.run(token, item)
        summary = evaluation.summary(names, parsed.seed)
    if parsed.json:
        emit_json(summary, indent=2)
    else:
        _print(summary)
    return interrupt.exit_code or 0


def _parser() -> Parser:
    parser = Parser(
        "bmoe eval",
        "Measure a model under a profile on FILE, one JSON object a line: perplexity of texts, accuracy on multiple\n"
        "choice, exact match on problems with a number for an answer; each with a bootstrap 95 % interval.",
        EXAMPLE,
    )
    parser.add_argument("file", metavar="FILE", help="the data: JSON lines")
    parser.add_argument("--profile", metavar="NAME|PATH", help="a profile file, or the name of a bundled one")
    add_profile_arguments(parser)
    parser.add_argument("--format", metavar="F", help="text, choice or gsm8k (told by the keys of the first line)")
    parser.add_argument("--metric", metavar="M,…", help="only these metrics, by name (all that the format has)")
    parser.add_argument("--against", metavar="RUN", help="resident: compare with the model in memory, token by token")
    parser.add_argument("--prompts", metavar="FORM", default="plain", help="plain, chat or raw: how to ask (plain)")
    parser.add_argument("-n", "--tokens", metavar="N", type=int, default=256, help="most tokens of a reply (256)")
    parser.add_argument("--limit", metavar="N", type=int, help="only the first N items")
    parser.add_argument("--out", metavar="PATH", help="keeps every reply (FILE's name with .replies.jsonl, here)")
    parser.add_argument("--resume", action="store_true", help="go on with the replies of an earlier run, if there are")
    parser.add_argument("--overwrite", action="store_true", help="replace the replies of an earlier run")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="seed of the bootstrap (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _check(parsed: argparse.Namespace) -> None:
    if parsed.profile is None:
        raise UsageError(f"no profile: name one with --profile; example: {EXAMPLE}")
    if parsed.format is not None:
        choose(parsed.format, KEYS, "format")
    if parsed.against is not None:
        choose(parsed.against, _AGAINST, "run to compare with")
    choose(parsed.prompts, FORMS, "form of prompts")
    if parsed.limit is not None and parsed.limit < 1:
        raise UsageError(f"--limit {parsed.limit}: no item would be left; give at least 1")
    if parsed.tokens < 1:
        raise UsageError(f"-n {parsed.tokens}: at least 1 token has to be asked for")
    if parsed.seed < 0:
        raise UsageError(f"--seed {parsed.seed}: is negative; give 0 or more")
    if parsed.resume and parsed.overwrite:
        raise UsageError("--resume keeps the earlier replies and --overwrite replaces them; give one of the two")


def _metrics(given: str | None, format_: str, *, paired: bool) -> list[str]:
    from bmoe.evaluate.metrics import METRICS, metrics_of

    available = metrics_of(format_, paired=paired)
    if given is None:
        return available
    names = [name.strip() for name in given.split(",")]
    for name in names:
        choose(name, METRICS, "metric")
        if format_ not in METRICS[name].formats:
            raise UsageError(f"--metric {name}: is no metric of {format_} data ({', '.join(available)})")
        if METRICS[name].paired and not paired:
            raise UsageError(f"--metric {name}: needs a run to compare with; add --against resident")
    return list(dict.fromkeys(names))


@contextlib.contextmanager
def _progress(
    evaluation: Evaluation, total: int, metric: str
) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """A bar on a terminal, with the first metric so far; nothing elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield (lambda: None), (lambda: None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=total - len(evaluation.pending), tokens=0)
        tokens = 0

        def token() -> None:
            nonlocal tokens
            tokens += 1
            progress.update(task, tokens=tokens)

        def item() -> None:
            progress.update(task, advance=1, description=f"{metric} {_figure(evaluation.value(metric))}")

        yield token, item


def _print(summary: Mapping[str, Any]) -> None:
    console = Console(stderr=True, highlight=False)
    emit(f"{summary['dataset']} ({summary['format']}): {summary['scored']} of {summary['items']} items\n")
    emit_table(
        ("metric", "value", "95 % interval", "over"),
        [(name, _figure(m["value"]), _interval(m), _over(name, m)) for name, m in summary["metrics"].items()],
    )
    for line, style in _remarks(summary):
        console.print(Text(line, style=style), soft_wrap=True)
    for each in summary["skipped"][:_SHOWN_SKIPPED]:
        complain(f"skipped line {each['line']} (id {each['id']}): {each['reason']}")
    if len(summary["skipped"]) > _SHOWN_SKIPPED:
        complain(f"skipped {len(summary['skipped'])} items in all; {summary['replies']} has every reason")


def _remarks(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if summary["bytes_per_token"] is None:
        yield "experts not streamed", ""
    else:
        rate = "" if summary["hit_rate"] is None else f"hit rate {100 * summary['hit_rate']:.1f} % · "
        yield f"{rate}{summary['bytes_per_token'] / _MIB:.2f} MiB/token", ""
    yield f"replies in {summary['replies']}", ""
    if summary["lossy"]:
        yield "lossy: the output may differ from that of the resident model", "bold magenta"
    if summary["windowed"]:
        yield f"notice: {summary['windowed']} longer than the context, scored in windows of it", "yellow"
    if 0 < summary["empty"] == summary["scored"] and summary["settings"]["prompts"] != "chat":
        yield "notice: every reply is empty; a model that was trained on chats wants --prompts chat", "yellow"
    if summary["sessions"] > 1:
        yield f"notice: done in {summary['sessions']} sessions, each with an empty cache at first", "yellow"
    if not summary["complete"]:
        left = summary["items"] - summary["scored"] - len(summary["skipped"])
        yield f"interrupted with {left} of {summary['items']} items left; --resume goes on", "yellow"
    for notice in (summary["run"] or {}).get("notices", ()):
        yield f"notice: {notice}", "yellow"


def _figure(value: float | None) -> str:
    if value is None:
        return "?"
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.{1 if abs(value) >= 1000 else 3 if abs(value) >= 1 else 4}f}"
    return f"{value:.2e}"


def _interval(metric: Mapping[str, Any]) -> str:
    return "?" if metric["low"] is None else f"{_figure(metric['low'])} to {_figure(metric['high'])}"


def _over(name: str, metric: Mapping[str, Any]) -> str:
    from bmoe.evaluate.metrics import METRICS

    items = f"{metric['items']} item" + ("" if metric["items"] == 1 else "s")
    what = {"tokens": "tokens", "compared": "positions"}.get(METRICS[name].count or "")
    return f"{metric['n']} {what} of {items}" if what else items
