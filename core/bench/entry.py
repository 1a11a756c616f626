"""The state of the machine when a measurement begins: what may explain a figure that is not the setting's."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bmoe.machine import read_machine


@dataclass(frozen=True, slots=True)
class EntryState:
    """``load_1min`` runnable tasks, ``available_bytes`` memory, ``temperature_c`` the hottest sensor, ``cpu_mhz`` mean.

    None = cannot be read here.
    """

    load_1min: float | None
    available_bytes: int | None
    temperature_c: float | None
    cpu_mhz: float | None


def read_entry_state(root: Path = Path("/")) -> EntryState:
    """Look at the machine now. ``root`` is where /proc and /sys are found."""
    degrees = [value for value in _numbers(root, _TEMPERATURES) if 0 < value < _IMPOSSIBLE]
    clocks = list(_numbers(root, _CLOCKS))
    return EntryState(
        load_1min=_load(root),
        available_bytes=read_machine(root).available_bytes,
        temperature_c=max(degrees) / 1000 if degrees else None,
        cpu_mhz=sum(clocks) / len(clocks) / 1000 if clocks else None,
    )


_TEMPERATURES = ("sys/class/thermal/thermal_zone*/temp", "sys/class/hwmon/hwmon*/temp*_input")
_CLOCKS = ("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq",)
_IMPOSSIBLE = 150_000  # thousandths of a degree; sensors that are not connected read as 200 °C or more, or as 0


def _numbers(root: Path, patterns: tuple[str, ...]) -> Iterator[int]:
    """The whole numbers in the files that match; a sensor that cannot be read is left out."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            try:
                yield int(path.read_text(encoding="ascii"))
            except (OSError, ValueError):
                continue


def _load(root: Path) -> float | None:
    try:
        text = (root / "proc/loadavg").read_text(encoding="ascii").split()
        load = float(text[0])
    except (OSError, ValueError, IndexError):
        return _system_load() if root == Path("/") else None
    return load if math.isfinite(load) else None


def _system_load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None
