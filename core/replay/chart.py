"""A picture of a comparison: hit rate and bytes per token over the budget, one column of axes per trace."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bmoe.errors import BmoeError
from bmoe.replay.contender import RULES
from bmoe.replay.sweep import MIB, Result

FORMATS = ("png", "svg", "pdf")


class ChartError(BmoeError):
    """A picture cannot be drawn or written; names the file and the remedy."""

    exit_code = 2


def check_chart(path: Path, *, overwrite: bool = False) -> None:
    """Raise :class:`ChartError` for what would fail only after the replays, or replace a file unasked."""
    if path.suffix[1:].lower() not in FORMATS:
        raise ChartError(f"--plot {path}: its ending says no kind of picture; end it in .{', .'.join(FORMATS)}")
    if path.is_dir():
        raise ChartError(f"--plot {path}: is a directory; name a file")
    if not path.parent.is_dir():
        raise ChartError(f"--plot {path}: the folder {path.parent} is not there; make it, or choose another place")
    plain = path.is_file() and not path.is_symlink()
    if os.path.lexists(path) and not (overwrite and plain):
        remedy = "choose another name, or replace it with --overwrite" if plain else "choose another name"
        raise ChartError(f"--plot {path}: is there already; {remedy}")
    _figure_module()


def write_chart(path: Path, results: Sequence[Result]) -> None:
    """Draw ``results``, a whole file or none. Raises :class:`ChartError` if it cannot be written."""
    figure = draw(results)
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    except OSError as error:
        raise ChartError(f"--plot {path}: cannot be written ({error.strerror}); choose another place") from error
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o666 & ~_umask())
            figure.savefig(file, format=path.suffix[1:].lower(), dpi=150)
        os.replace(beside, path)
    except OSError as error:
        raise ChartError(f"--plot {path}: cannot be written ({error.strerror}); choose another place") from error
    finally:
        Path(beside).unlink(missing_ok=True)


def draw(results: Sequence[Result]) -> Any:
    """The figure: per trace hit rate (%) above and MiB read per token below, over the budget in MiB."""
    sources = list(dict.fromkeys(result.trace.source for result in results))
    labels = list(dict.fromkeys(result.contender.label for result in results))
    size = 1.0 + 4.5 * len(sources), 6.5
    figure = _figure_module().Figure(figsize=size, layout="constrained")
    grid = figure.subplots(2, len(sources), sharex="col", squeeze=False)
    for (above, below), source in zip(grid.T, sources, strict=True):
        of_trace = [result for result in results if result.trace.source == source]
        for index, label in enumerate(labels):
            line = sorted((r for r in of_trace if r.contender.label == label), key=lambda r: r.budget_bytes)
            style: dict[str, Any] = {"color": f"C{index % 10}", "marker": "o", "label": label}
            if line[0].contender.name in RULES:
                style |= {"color": "black", "linestyle": "--" if index % 2 else ":"}
            budgets = [r.budget_bytes / MIB for r in line]
            above.plot(budgets, [100 * (r.played.hit_rate or 0.0) for r in line], **style)
            if line[0].mib_per_token is not None:
                below.plot(budgets, [r.mib_per_token for r in line], **style)
        trace = of_trace[0].trace
        for axes in (above, below):
            axes.axvline(trace.cycle_bytes / MIB, color="0.6", linewidth=1)
            axes.grid(alpha=0.3)
            axes.set_ylim(bottom=0)
        above.set_ylim(0, 100)
        above.annotate(
            "token cycle", (trace.cycle_bytes / MIB, 98), (3, 0), textcoords="offset points", va="top", color="0.4"
        )
        name = trace.model or Path(source).name
        above.set_title(f"{name}\n{trace.n_used} of {trace.n_expert} experts per token as recorded", fontsize="medium")
        below.set_xlabel("cache budget (MiB)")
    grid[0][0].set_ylabel("hit rate of decode (%)")
    grid[1][0].set_ylabel("experts read (MiB per token)")
    grid[0][0].legend(fontsize="small")
    return figure


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def _figure_module() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ChartError('--plot: needs matplotlib, which is not installed; pip install "bmoe[plots]"') from error
