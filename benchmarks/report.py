"""What a benchmark hands over: text or one JSON object, with the machine that it is true of, and a plot."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bar:
    """One figure of a plot: lower end, middle, upper end."""

    label: str
    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Plot:
    """Bars over one axis, and the value that they are to stay below, or to reach."""

    title: str
    axis: str
    bars: Sequence[Bar]
    target: float | None = None

    def draw(self, path: Path) -> None:
        """Write it as an image; the ending of ``path`` says of which kind. Raises SystemExit without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise SystemExit("--plot needs matplotlib: pip install 'bmoe[plots]'") from error
        figure = Figure(figsize=(7.5, 1.2 + 0.5 * len(self.bars)), layout="constrained")
        axes = figure.add_subplot()
        rows = range(len(self.bars))
        middles = [bar.middle for bar in self.bars]
        spread = [[b.middle - b.low for b in self.bars], [b.high - b.middle for b in self.bars]]
        axes.barh(rows, middles, height=0.6, color="#4477aa", xerr=spread, ecolor="#222222", capsize=4)
        axes.set_yticks(rows, [bar.label for bar in self.bars])
        axes.invert_yaxis()
        reach = max([*(bar.high for bar in self.bars), self.target or 0.0])
        for row, bar in zip(rows, self.bars, strict=True):
            axes.annotate(f"{bar.middle:.3g}", (bar.high, row), (6, 0), textcoords="offset points", va="center")
        told = self.axis
        if self.target is not None:
            axes.axvline(self.target, color="#cc3311", linestyle="--")
            told = f"{self.axis} (dashed: the target, {self.target:g})"
        axes.set_xlim(0, 1.15 * reach)
        axes.set_xlabel(told)
        axes.set_title(self.title, loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=120)


def machine() -> dict[str, Any]:
    """Processor, memory and versions, and the load of the last minute."""
    cpu = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
        memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    except OSError:
        memory = None
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "bmoe": version("bmoe"),
        "llama_cpp": version("llama-cpp-python"),
        "load_1min": os.getloadavg()[0],
    }


def publish(result: dict[str, Any], arguments: argparse.Namespace, lines: Sequence[str], plot: Plot) -> None:
    """Print as the arguments say, and draw if they do."""
    if arguments.plot is not None:
        plot.draw(arguments.plot)
    if arguments.json:
        print(json.dumps({**result, "machine": machine()}))
    else:
        print("\n".join(lines))
