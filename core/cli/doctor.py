"""``bmoe doctor``: what this machine and drive grant, each line a verdict and, if it could be better, a remedy."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from bmoe.bundled import find_model
from bmoe.cli.arguments import Parser
from bmoe.cli.output import emit, emit_json, emit_table
from bmoe.doctor.findings import Check, Finding, Sources
from bmoe.doctor.report import as_json, examine, usable

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def main(arguments: Sequence[str]) -> int:
    """Make every check and print what was found; 0 if bmoe can run here, 1 if not."""
    parser = Parser(
        "bmoe doctor",
        "Tell whether bmoe runs on this machine, and what would make it better: software, memory limits, the drive,\n"
        "the processor. Takes about a minute, with --quick some ten seconds.",
        "bmoe doctor model.gguf --quick",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        default="bmoe-ref",
        help="a model file, which is only read, or a folder, in which a file of at most 256 MiB is made and removed "
        "again (the model that comes with bmoe)",
    )
    parser.add_argument("--quick", action="store_true", help="leave out what takes long, and say so")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse(arguments)
    sources = Sources(find_model(parsed.path), parsed.quick)
    found = list(_made(sources))
    if parsed.json:
        emit_json(as_json(sources, found), indent=2)
    else:
        _print(found)
    return 0 if usable(found) else 1


def _made(sources: Sources) -> Iterator[tuple[Check, Finding]]:
    """Every check with its finding; on a terminal the one that is being made is shown."""
    with _status() as say:
        for check, finding in examine(sources):
            if finding is None:
                say(f"{check.name}: {check.question}?")
            else:
                yield check, finding


class _Silent:
    def __call__(self, text: str) -> None:
        """Nobody looks."""


@contextmanager
def _status() -> Iterator[_Silent]:
    if sys.stderr is None or not sys.stderr.isatty():
        yield _Silent()
        return
    with Console(stderr=True, markup=False, highlight=False).status("") as status:

        class Shown(_Silent):
            def __call__(self, text: str) -> None:
                status.update(text)

        yield Shown()


def _print(found: Sequence[tuple[Check, Finding]]) -> None:
    counts = {verdict: sum(finding.verdict == verdict for _, finding in found) for verdict in _STYLES}
    if sys.stdout is not None and sys.stdout.isatty():
        _print_table(found)
    else:
        width = max(len(check.name) for check, _ in found)
        for check, finding in found:
            emit(f"{finding.verdict:7}  {check.name:{width}}  {_shown(finding.measured)}\n")
            if finding.remedy:
                emit(f"{'':7}  {'':{width}}  → {finding.remedy}\n")
    for check, finding in found:
        if check.name == "bandwidth" and finding.values.get("grid"):
            emit("\n")
            emit_table(*_grid(finding.values["grid"]))
    notes = f"{counts['ok']} ok, {counts['note']} noted, {counts['problem']} in the way"
    emit(f"\n{notes}: bmoe {'can run here' if usable(found) else 'cannot run like this'}\n")


def _print_table(found: Sequence[tuple[Check, Finding]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("verdict", "check"):
        table.add_column(column, no_wrap=True)
    table.add_column("measured", overflow="fold")
    for check, finding in found:
        lines = _shown(finding.measured) + (f"\n→ {finding.remedy}" if finding.remedy else "")
        table.add_row(
            finding.verdict, check.name, lines, style="" if finding.verdict == "ok" else _STYLES[finding.verdict]
        )
    console = Console(highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    emit(captured.get())


def _grid(cells: Sequence[Mapping[str, object]]) -> tuple[Sequence[str], list[list[str]]]:
    """Rows by fetcher and lanes, a column for each size of reads, in GB/s."""
    sizes = sorted({int(str(cell["read_bytes"])) for cell in cells})
    rates = {(cell["fetcher"], cell["lanes"], cell["read_bytes"]): float(str(cell["bytes_per_s"])) for cell in cells}
    rows = []
    for fetcher, lanes in dict.fromkeys((cell["fetcher"], cell["lanes"]) for cell in cells):
        row = [rates.get((fetcher, lanes, nbytes)) for nbytes in sizes]
        rows.append([str(fetcher), str(lanes), *("-" if rate is None else f"{rate / 1e9:.2f}" for rate in row)])
    return ("fetcher", "lanes", *(f"{nbytes >> 10} KiB, GB/s" for nbytes in sizes)), sorted(rows, key=lambda r: r[0])


def _shown(text: str) -> str:
    """Text of a machine as a line that no terminal acts on."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
