"""What was measured once and is remembered: one JSON file with a section per question, an entry per key in each.

``fetch`` says which fetcher was the fastest on which drive, ``cache`` which policy replayed best for which model. What
is in it may be lost at any time, and whatever is wrong with it, nothing is remembered then.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmoe.contracts import ModelFacts
from bmoe.fingerprint import fingerprint

SCHEMA = 1
SECTIONS = ("fetch", "cache")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which of the candidates, and why, for the run record."""

    name: str
    why: str


def recall(memory: Path | None, section: str, key: str, names: Sequence[str]) -> Verdict | None:
    """What is remembered of ``key``, if it is one of ``names``; None if there is nothing, or it is not ours."""
    known = _sections(memory)[section].get(key)
    if isinstance(known, dict) and known.get("plugin") in names and isinstance(known.get("why"), str):
        return Verdict(known["plugin"], known["why"])
    return None


def remember(memory: Path | None, section: str, key: str, verdict: Verdict) -> bool:
    """Add one entry, and say whether that was possible.

    Another process may do the same at this moment: then one of both is lost and found again some day.
    """
    if memory is None:
        return False
    known = _sections(memory)
    known[section][key] = {"plugin": verdict.name, "why": verdict.why}
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=memory.name, dir=memory.parent)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump({"schema": SCHEMA, **known}, file, indent=1)
            os.replace(name, memory)
        except OSError:
            os.unlink(name)
            raise
    except OSError:
        return False
    return True


def best_policy(memory: Path | None, facts: ModelFacts, names: Sequence[str]) -> Verdict:
    """The cache policy that replayed best for this model; the first of ``names`` if nobody has looked."""
    known = recall(memory, "cache", fingerprint(facts), names) if facts.banks else None
    return known or Verdict(names[0], "the default; bmoe replay TRACE --choose finds the best for a model")


def remember_policy(memory: Path | None, facts: ModelFacts, verdict: Verdict) -> bool:
    """Let :func:`best_policy` say this of the model from now on; False if it cannot be kept."""
    return remember(memory, "cache", fingerprint(facts), verdict)


def _sections(memory: Path | None) -> dict[str, dict[str, Any]]:
    """All that is remembered; nothing if the file is not there or not ours."""
    found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    if memory is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            table = json.loads(memory.read_text(encoding="utf-8"))
            if table["schema"] == SCHEMA:
                found |= {name: dict(table[name]) for name in SECTIONS if isinstance(table.get(name), dict)}
    return found
