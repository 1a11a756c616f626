"""``bmoe bench``: which setting is faster, measured in turn, with an interval, and a verdict only if it excludes 1."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bmoe.cli.arguments import Parser, UsageError, add_profile_arguments, choose
from bmoe.cli.files import refuse_unwritable, replace_file
from bmoe.cli.folders import fetch_memory
from bmoe.cli.interrupt import Interrupt
from bmoe.cli.output import complain, emit, emit_json, emit_table
from bmoe.errors import BmoeError

if TYPE_CHECKING:
    from bmoe.bench.result import Result
    from bmoe.bench.schedule import Turn

EXAMPLE = "bmoe bench --profile demo --vary cache.budget_mb=3,9 --rounds 6 -n 16 --set model.threads=1"


def main(arguments: Sequence[str]) -> int:
    """Measure and print; what was measured is printed after a Ctrl-C and beside a side that failed too."""
    parsed = _parser().parse(arguments)
    _check(parsed)

    from bmoe.bench.result import Settings
    from bmoe.bench.run import Bench
    from bmoe.bench.sides import make_sides, parse_vary, refuse_wrong

    vary = [parse_vary(text) for text in parsed.vary]
    sides = make_sides(parsed.profile, model=parsed.model, overrides=parsed.overrides, vary=vary)
    refuse_wrong(sides, fetch_memory())
    settings = Settings(
        parsed.rounds, parsed.tokens, parsed.warmup, parsed.cooldown, parsed.seed, silence_s=parsed.timeout
    )
    bench = Bench(sides, settings, remember=fetch_memory())
    files = _Files(bench.result, parsed)
    try:
        with Interrupt(bench.cancel) as interrupt, _progress(bench.result) as (before, after):

            def done(turn: Turn) -> None:
                _say_failure(bench.result, turn.side)
                files.keep()
                after(turn)

            bench.run(before, done)
    finally:
        files.keep()
        files.report()
    try:
        _print(bench.result, parsed)
    finally:
        files.plot()
    return interrupt.exit_code or (1 if bench.result.failures or files.failed else 0)


def _parser() -> Parser:
    parser = Parser(
        "bmoe bench",
        "Compare settings: every side continues the same texts, in turn and in a process of its own, and each is\n"
        "compared with the first. A verdict is given only if the interval of the ratio excludes 1.",
        EXAMPLE,
    )
    parser.add_argument(
        "--profile", metavar="NAME|PATH", action="append", default=[], help="a side; the first is the baseline"
    )
    parser.add_argument(
        "--vary", metavar="KEY=V,V", action="append", default=[], help="make a side of every value; may be repeated"
    )
    add_profile_arguments(parser)
    parser.add_argument("-n", "--tokens", metavar="N", type=int, default=64, help="tokens measured each time (64)")
    parser.add_argument(
        "--rounds", "--pairs", metavar="N", type=int, default=8, help="how often every side is measured (8)"
    )
    parser.add_argument("--warmup", metavar="N", type=int, default=16, help="tokens before, which do not count (16)")
    parser.add_argument(
        "--cooldown", metavar="SECONDS", type=float, default=2.0, help="wait between two measurements (2)"
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=300.0, help="end a side that is silent for so long (300)"
    )
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="seed of the bootstrap (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every token")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table, a row for each side")
    parser.add_argument("--out", metavar="FILE", help="keep the JSON object in FILE, after every measurement")
    parser.add_argument("--plot", metavar="FILE", help="draw tokens and ratios; .png, .svg or .pdf")
    parser.add_argument("--report", metavar="FILE", help="write one JSON file to share, without names and paths")
    return parser


def _check(parsed: argparse.Namespace) -> None:
    if not parsed.profile:
        raise UsageError(f"no profile: name one with --profile; example: {EXAMPLE}")
    for name, least in (("rounds", 1), ("warmup", 0), ("seed", 0)):
        if getattr(parsed, name) < least:
            raise UsageError(f"--{name} {getattr(parsed, name)}: is too small; give {least} or more")
    if parsed.tokens < 1:
        raise UsageError(f"-n {parsed.tokens}: at least 1 token has to be measured")
    if not 0 <= parsed.cooldown <= 86400:
        raise UsageError(f"--cooldown {parsed.cooldown:g}: give 0 to 86400 seconds")
    if not 0 < parsed.timeout <= 86400:
        raise UsageError(f"--timeout {parsed.timeout:g}: give more than 0 and at most 86400 seconds")
    if parsed.json and parsed.markdown:
        raise UsageError("--json and --markdown both want standard output; give one (--out FILE keeps the JSON)")
    files = {name: getattr(parsed, name) for name in ("out", "plot", "report") if getattr(parsed, name) is not None}
    if parsed.plot is not None:
        from bmoe.bench.plot import KINDS, refuse_without_matplotlib

        choose(_kind(parsed.plot), KINDS, f"kind of image that --plot {parsed.plot} can be; end it in one of them")
        refuse_without_matplotlib()
    for name, path in files.items():
        refuse_unwritable(f"--{name}", path)
        if sum(Path(other).resolve() == Path(path).resolve() for other in files.values()) > 1:
            raise UsageError(f"--{name} {path}: is written by another option too; give each a file of its own")


def _kind(path: str) -> str:
    return Path(path).suffix.lower().lstrip(".")


def _say_failure(result: Result, side: int) -> None:
    failure = result.failures.get(side)
    if failure is not None:
        complain(f"side {result.sides[side].label}: {failure.reason}")


class _Files:
    """The files that were asked for. One that cannot be written is said, and costs neither the bench nor the others."""

    def __init__(self, result: Result, parsed: argparse.Namespace) -> None:
        self._result, self._parsed = result, parsed
        self.failed: set[str] = set()

    def keep(self) -> None:
        """The JSON so far."""
        self._write("out", lambda: json.dumps(self._result.as_dict()).encode())

    def report(self) -> None:
        """The report, if anything was measured."""
        from bmoe.bench.anonymous import anonymous

        if self._result.trials:
            self._write("report", lambda: json.dumps(anonymous(self._result), indent=1).encode())

    def plot(self) -> None:
        """The image, if anything was measured."""
        from bmoe.bench.plot import draw

        if self._result.trials:
            self._write("plot", lambda: draw(self._result, _kind(self._parsed.plot)))

    def _write(self, name: str, content: Callable[[], bytes]) -> None:
        path = getattr(self._parsed, name)
        if path is None or name in self.failed:
            return
        try:
            replace_file(f"--{name}", path, content())
        except BmoeError as error:
            complain(str(error))
            self.failed.add(name)


@contextlib.contextmanager
def _progress(result: Result) -> Iterator[tuple[Callable[[Turn], None], Callable[[Turn], None]]]:
    """A bar on a terminal, with the side that is measured; nothing elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield (lambda turn: None), (lambda turn: None)
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=result.settings.rounds * len(result.sides))

        def before(turn: Turn) -> None:
            progress.update(task, description=escape(f"round {turn.round + 1}: {result.sides[turn.side].label}"))

        yield before, lambda turn: progress.update(task, completed=len(result.trials))


def _print(result: Result, parsed: argparse.Namespace) -> None:
    from bmoe.cli import bench_tables as tables

    if parsed.json:
        emit_json(result.as_dict())
        return
    if not result.trials:
        complain("nothing was measured")
        return
    if parsed.markdown:
        emit("\n".join(tables.markdown(result)) + "\n")
    else:
        for columns, rows in tables.plain(result):
            emit_table(columns, rows)
            emit("\n")
        for line in tables.verdicts(result):
            emit(line + "\n")
    for line in tables.notes(result):
        complain(line)
