"""What a check is, what it may look at, and what it finds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bmoe.doctor.apart import Answer, ask

Verdict = Literal["ok", "note", "problem"]
"""``ok``; ``note``: bmoe runs, and slower or with less than it could; ``problem``: bmoe cannot be used like this."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict, what was measured in words, the remedy ("" if ok), and the figures behind the words."""

    verdict: Verdict
    measured: str
    remedy: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sources:
    """What checks look at. Tests hand in recorded trees and answers.

    ``path`` is a model file or a folder; ``root`` is where /proc and /sys are found; ``ask`` runs a probe in a process
    of its own; ``which`` finds a program. ``quick`` leaves out what takes long; ``known`` keeps what several
    checks want.
    """

    path: str
    quick: bool = False
    root: Path = Path("/")
    ask: Callable[[str, Sequence[Any], float], Answer] = ask
    which: Callable[[str], str | None] = shutil.which
    known: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """One question. ``remedies`` are all that its finding may name; the documentation has the same.

    ``seconds`` bound it. What is ``needed`` and cannot be told is a problem; otherwise it is a note.
    """

    name: str
    question: str
    look: Callable[[Sources], Finding]
    remedies: tuple[str, ...]
    seconds: float = 5.0
    needed: bool = False


def ok(measured: str, **values: Any) -> Finding:
    """All is well."""
    return Finding("ok", measured, "", values)


def note(measured: str, remedy: str, **values: Any) -> Finding:
    """It runs, and here is what would make it better."""
    return Finding("note", measured, remedy, values)


def problem(measured: str, remedy: str, **values: Any) -> Finding:
    """It cannot be used like this."""
    return Finding("problem", measured, remedy, values)


def text_of(path: Path) -> str:
    """A small file's text; "" where it is missing, or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number_of(path: Path) -> int | None:
    """A small file's whole number; None where there is none."""
    text = text_of(path)
    return int(text) if text.removeprefix("-").isascii() and text.removeprefix("-").isdecimal() else None


def fields_of(path: Path) -> dict[str, int]:
    """The numbers of a file with lines such as ``MemTotal: 123 kB`` or ``nr_throttled 4``, by name, as they stand."""
    found: dict[str, int] = {}
    for line in text_of(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isascii() and words[1].isdecimal():
            found[words[0]] = int(words[1])
    return found


def size(nbytes: float) -> str:
    """Bytes for a person."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}" if nbytes % unit else f"{nbytes // unit:.0f} {name}"
    return f"{nbytes:.0f} bytes"
