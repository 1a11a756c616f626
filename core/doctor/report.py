"""All checks, one after the other, each with an end; and what they found as plain data."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from bmoe.doctor import drive, limits, processor, software
from bmoe.doctor.findings import Check, Finding, Sources, note, problem
from bmoe.errors import BmoeError
from bmoe.telemetry import SCHEMA

CHECKS: tuple[Check, ...] = (*software.CHECKS, *limits.CHECKS, *drive.CHECKS, *processor.CHECKS)
"""In the order in which they are made; those of the drive follow ``place``, those of the processor come last."""

LATE = "find out what hangs (a drive that is gone, a network without an answer): bmoe would hang on it too"
FAILED = "the check itself failed, or the system hides what it reads: please report it, with what --json prints"
FIRST = "see to the line about the place first"
GENERAL = (LATE, FAILED, FIRST)
"""Remedies that any check may name."""


def examine(sources: Sources, checks: Sequence[Check] = CHECKS) -> Iterator[tuple[Check, Finding | None]]:
    """Every check, first without its finding, as it begins, then with it. Never raises for what a check does."""
    lost = False
    for check in checks:
        yield check, None
        if lost and check in drive.CHECKS:
            yield check, note("not looked at", FIRST)
            continue
        found = look(check, sources)
        lost = lost or (check.name == drive.PLACE and found.verdict == "problem")
        yield check, found


def look(check: Check, sources: Sources) -> Finding:
    """One check's finding within its time, whatever it does."""
    found: list[Finding] = []
    thread = threading.Thread(target=lambda: found.append(_attempt(check, sources)), name=check.name, daemon=True)
    thread.start()
    thread.join(check.seconds)
    if found:
        return found[0]
    return _untold(check, f"no answer within {check.seconds:g} s", LATE)


def _attempt(check: Check, sources: Sources) -> Finding:
    try:
        return check.look(sources)
    except BmoeError as error:
        return _untold(check, str(error), FAILED)
    except Exception as error:  # noqa: BLE001 - one check that fails is a line and not the end
        return _untold(check, f"{type(error).__name__}: {error}", FAILED)


def _untold(check: Check, measured: str, remedy: str) -> Finding:
    return problem(measured, remedy) if check.needed else note(measured, remedy)


def usable(found: Sequence[tuple[Check, Finding]]) -> bool:
    """Whether bmoe can run at all."""
    return all(finding.verdict != "problem" for _, finding in found)


def as_json(sources: Sources, found: Sequence[tuple[Check, Finding]]) -> dict[str, Any]:
    """All of it as plain data; ``remedy`` is null where none is needed."""
    return {
        "schema": SCHEMA,
        "path": sources.path,
        "quick": sources.quick,
        "usable": usable(found),
        "checks": [
            {
                "check": check.name,
                "verdict": finding.verdict,
                "measured": finding.measured,
                "remedy": finding.remedy or None,
                "values": dict(finding.values),
            }
            for check, finding in found
        ],
    }
