"""``bmoe synth``: write a model with the shape of a named one and random weights."""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from bmoe.cli.arguments import Parser, UsageError, choose
from bmoe.cli.interrupt import Interrupt
from bmoe.cli.output import complain, emit

_SHOWN_FROM = 64 << 20


def main(arguments: Sequence[str]) -> int:
    """Write the model and say what it is; interrupted, say so and leave nothing."""
    parsed = _parse(arguments)
    stop = threading.Event()
    with Interrupt(stop.set) as interrupt:
        try:
            path = _write(parsed, stop)
        except KeyboardInterrupt:
            complain(f"{parsed.out}: interrupted, nothing was written")
            return interrupt.exit_code or 130
    emit(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, the shape of {parsed.like}\n")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    from bmoe.synth import QUANTS, SHAPES

    parser = Parser(
        "bmoe synth",
        "Write a gguf file with the shape of a named model and random weights: it computes like the real one and\n"
        f"says nonsense. Shapes: {', '.join(SHAPES)}. Quantisations: {', '.join(QUANTS)}.",
        "bmoe synth tiny.gguf --like tiny-qwen3moe --quant Q4_K --locality 0.8",
    )
    parser.add_argument("out", metavar="OUT", help="the file to write")
    parser.add_argument("--like", metavar="NAME", required=True, help="the shape")
    parser.add_argument("--layers", metavar="N", type=int, help="number of layers (the shape's own)")
    parser.add_argument("--quant", metavar="Q", help="quantisation of the experts (the shape's own)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="the same seed gives the same bytes (0)")
    parser.add_argument("--sparse", action="store_true", help="leave the experts as holes, which take no disk space")
    parser.add_argument(
        "--locality", metavar="L", type=float, default=0.0, help="0 to 1: how much tokens are routed alike (0)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a file")
    parsed = parser.parse(arguments)
    choose(parsed.like, SHAPES, "shape")
    if parsed.quant is not None:
        parsed.quant = choose(parsed.quant.upper(), QUANTS, "quantisation")
    return parsed


def _write(parsed: argparse.Namespace, stop: threading.Event) -> Path:
    """The written file. Raises :class:`UsageError` naming the option at fault, KeyboardInterrupt after ``stop``."""
    from bmoe.synth import ArgumentError, write_model

    with _progress() as show:

        def progress(written: int, total: int) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            show(written, total)

        try:
            return write_model(
                parsed.out,
                parsed.like,
                layers=parsed.layers,
                quant=parsed.quant,
                seed=parsed.seed,
                sparse=parsed.sparse,
                locality=parsed.locality,
                overwrite=parsed.overwrite,
                progress=progress,
            )
        except ArgumentError as error:
            place = error.argument == "out"
            raise UsageError(str(error) if place else f"--{error.argument} {error.value}: {error.reason}") from error


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar for a large file on a terminal; nothing elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda written, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, visible=False)
        yield lambda written, total: bar.update(task, completed=written, total=total, visible=total >= _SHOWN_FROM)
