"""Memory pressure between tokens: when the cache holds more than the machine concedes, it warns, or gives some back.

It only ever shrinks. A governor that grows again starts a reclaim war with the kernel: a budget that the machine does
not concede is read back and taken again, and the loop feeds that. Two signs count, over windows of a second or more:
major faults, each a hidden read of memory that had been there, and the stall time of memory (PSI), of the machine and
of the own control group where that has a figure of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from bmoe.machine import control_groups

WINDOW_S = 1.0
"""The least seconds that a window covers; between two windows a token costs one look at the clock."""
FAULTS_PER_S = 200.0
SOME_SHARE, FULL_SHARE = 0.20, 0.05
"""What is pressure in a window: major faults a second, or the share of time in which some, or all, tasks stalled."""
WINDOWS = 2
"""So many windows under pressure in a row count: a first use of weights, or a neighbour that starts, is none."""
KEPT = 0.75
"""The share of its budget that a shrunk cache keeps."""
CALM_S = 30.0
"""Seconds without pressure after which the same may be said again."""


Stalls = tuple[int | None, int | None]
"""Microseconds since ever in which some, and all, tasks stalled on memory; None = unmeasured."""


class Reading(NamedTuple):
    """Counters at one moment, since ever: seconds of a clock, major faults (None = unmeasured), stalls per source."""

    at_s: float
    majflt: int | None
    stalls: tuple[Stalls, ...] = ()


class Advice(NamedTuple):
    """What was seen, in words, and the budget that the cache should have now; None where nothing is to be changed."""

    reason: str
    budget_bytes: int | None


@dataclass(slots=True)
class Judge:
    """Decides from readings alone. ``floor_bytes``: what a cache keeps in any case, one token's cycle.

    A budget shrinks by a quarter at a time, in every :data:`WINDOWS` windows under pressure at most once, and never
    below the floor; so the number of shrinks is bounded, and once there it only warns.
    """

    mode: Literal["warn", "shrink"]
    floor_bytes: int
    _last: Reading | None = None
    _bad: int = 0
    _told_at: float | None = None

    def judge(self, reading: Reading, budget_bytes: int) -> Advice | None:
        """What to do about one more reading; None as a rule. ``budget_bytes`` is what the cache may hold now."""
        last = self._last
        if last is None:
            self._last = reading
            return None
        if reading.at_s - last.at_s < WINDOW_S:
            return None
        self._last = reading
        reason = _pressure(last, reading)
        if not reason:
            self._bad = 0
            if self._told_at is not None and reading.at_s - self._told_at >= CALM_S:
                self._told_at = None
            return None
        self._bad += 1
        if self._bad < WINDOWS:
            return None
        self._bad = 0
        smaller = max(self.floor_bytes, int(budget_bytes * KEPT))
        if self.mode == "shrink" and smaller < budget_bytes:
            self._told_at = reading.at_s
            return Advice(reason, smaller)
        told, self._told_at = self._told_at, reading.at_s
        return Advice(reason, None) if told is None else None


def _pressure(before: Reading, now: Reading) -> str:
    """What of two readings is pressure, in words; "" if nothing is."""
    seconds = now.at_s - before.at_s
    found = []
    if before.majflt is not None and now.majflt is not None:
        rate = (now.majflt - before.majflt) / seconds
        if rate >= FAULTS_PER_S:
            found.append(f"{rate:.0f} major faults a second")
    for index, (who, limit) in enumerate((("some tasks", SOME_SHARE), ("all tasks", FULL_SHARE))):
        pairs = [(then[index], since[index]) for then, since in zip(before.stalls, now.stalls, strict=True)]
        shares = [(b - a) / 1e6 / seconds for a, b in pairs if a is not None and b is not None]
        if (share := max(shares, default=0.0)) >= limit:
            found.append(f"{who} stalled on memory {min(share, 1.0):.0%} of the time")
    return ", ".join(found)


class PressureWatch:
    """Reads the counters on descriptors that stay open and asks a :class:`Judge`.

    ``sample`` costs one look at the clock while a window lasts, and about 20 µs at its end.
    """

    def __init__(
        self,
        mode: Literal["warn", "shrink"],
        floor_bytes: int,
        *,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._judge = Judge(mode, floor_bytes)
        self._clock = clock
        places = [root / "proc/pressure/memory", *_group_files(root)]
        self._files = [fd for place in places if (fd := _open(place)) is not None]
        self._next = 0.0

    def sample(self, budget_bytes: int) -> Advice | None:
        """Between two tokens: None as a rule, else what was seen and what to do. Never asks for more memory."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + WINDOW_S
        reading = Reading(now, _major_faults(), tuple(_stalls(fd) for fd in self._files))
        return self._judge.judge(reading, budget_bytes)

    def close(self) -> None:
        """Close the descriptors. May be called twice."""
        for fd in self._files:
            os.close(fd)
        self._files = []


def _group_files(root: Path) -> Iterable[Path]:
    """The stall times of the own control group, if one below the root of all keeps them."""
    for group in control_groups(root):
        place = group / "memory.pressure"
        if place.exists():
            return [place]
    return []


def _open(place: Path) -> int | None:
    try:
        return os.open(place, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None


def _stalls(fd: int) -> Stalls:
    """What one source says; a kernel may have the file and refuse to say."""
    try:
        lines = os.pread(fd, 512, 0).split(b"\n")
    except OSError:
        return None, None
    return _total(lines, b"some "), _total(lines, b"full ")


def _total(lines: list[bytes], kind: bytes) -> int | None:
    for line in lines:
        if line.startswith(kind):
            digits = line.rpartition(b"total=")[2]
            return int(digits) if digits.isdigit() else None
    return None


def _major_faults() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
