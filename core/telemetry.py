"""What a run records about itself and its machine, the form that records have outside, and their fan-out to sinks.

Records themselves are plain data in :mod:`bmoe.contracts`; here they are filled, turned into JSON and handed on.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import platform
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmoe.contracts import Cause, RunRecord, RunSummary, Sink, TokenRecord
from bmoe.errors import PluginError
from bmoe.log import get_logger
from bmoe.machine import read_machine
from bmoe.process import pressure_source

if TYPE_CHECKING:
    from bmoe.plan import Plan

SCHEMA = 1
"""Number carried by every JSON record; raised when a field changes its meaning or disappears, not when one is added."""

_EVENTS: dict[type, str] = {RunRecord: "run", TokenRecord: "token", RunSummary: "summary"}
_FIELDS = {kind: tuple(f.name for f in dataclasses.fields(kind)) for kind in _EVENTS}
_PACKAGES = ("bmoe", "llama-cpp-python", "numpy")


def record_json(record: RunRecord | TokenRecord | RunSummary) -> dict[str, Any]:
    """A record as a dictionary that ``json.dumps`` takes: ``event``, ``schema``, then every field; null = unmeasured.

    A token carries its residual ``compute_s`` as well. Infinite and undefined numbers become null: JSON has none.
    """
    kind = type(record)
    out: dict[str, Any] = {"event": _EVENTS[kind], "schema": SCHEMA}
    for name in _FIELDS[kind]:
        out[name] = _plain(getattr(record, name))
    if isinstance(record, TokenRecord):
        out["compute_s"] = _plain(record.compute_s)
    return out


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, Cause):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)


def describe_run(plan: Plan, *, notices: Sequence[str] = (), resolved: Mapping[str, Any] | None = None) -> RunRecord:
    """The run record of ``plan`` on this machine.

    ``notices`` are added to the plan's own; ``resolved`` overrides what the plan expected with what really happened.
    """
    profile = plan.profile
    return RunRecord(
        run_id=uuid.uuid4().hex,
        model=plan.facts.path,
        arch=plan.facts.arch,
        versions=versions(),
        machine=machine_facts(plan.facts.path),
        profile=profile.model_dump(mode="json"),
        resolved={**plan.resolved(), **(resolved or {})},
        traced=any((profile.trace.route, profile.trace.io, profile.trace.compute)),
        sampled=profile.sampling.temp > 0,
        lossy=plan.lossy,
        speculative=plan.draft is not None,
        notices=(*plan.notices, *notices),
    )


def versions() -> dict[str, str]:
    """Versions of bmoe, Python, llama-cpp-python, numpy and the kernel; "not installed" where there is none."""
    found = {"python": platform.python_version(), "kernel": f"{platform.system()} {platform.release()}"}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine_facts(model: str, root: Path = Path("/")) -> dict[str, Any]:
    """The machine as it matters to a figure; every value is None where it cannot be read.

    ``cpu`` model name, ``cpus`` this process may use, ``memory_bytes`` in all, ``filesystem`` type under ``model`` and
    its ``device``, ``pressure`` the resource whose stall time the token records count. ``root`` is where /proc is.
    """
    machine, proc = read_machine(root), str(root / "proc")
    kind, device = filesystem(model, proc)
    return {
        "system": machine.system,
        "arch": machine.arch,
        "cpu": _cpu_model(proc),
        "cpus": machine.cpus,
        "memory_bytes": _memory_bytes(proc),
        "page_bytes": machine.page_bytes,
        "filesystem": kind,
        "device": device,
        "pressure": pressure_source(proc),
    }


def filesystem(path: str, proc: str = "/proc") -> tuple[str | None, str | None]:
    """Type and source of the mount that holds ``path``, from mountinfo; (None, None) where it cannot be told."""
    target = os.path.realpath(path)
    best: tuple[int, str | None, str | None] = (-1, None, None)
    for line in _read(f"{proc}/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) < 5 or len(tail) < 2:
            continue
        point = _unescape(fields[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best[0]:  # a later mount at the same point hides the earlier one
            best = (len(point), tail[0], _unescape(tail[1]))
    return best[1], best[2]


def _unescape(field: str) -> str:
    """Mountinfo writes space, tab, newline and backslash as three octal digits."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field


def _cpu_model(proc: str) -> str | None:
    names: dict[str, str] = {}
    for line in _read(f"{proc}/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        names.setdefault(key.strip().lower(), value.strip())
    # arm64 kernels name no model, but phones put the chip under "Hardware"
    return names.get("model name") or names.get("hardware") or platform.processor() or None


def _memory_bytes(proc: str) -> int | None:
    for line in _read(f"{proc}/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class FanOut:
    """Hands records to the sinks of a profile, in its order.

    A sink that cannot open is a :class:`PluginError`, and those opened before it are closed. A sink that raises later
    is closed, reported once on the log and left out until the next run: telemetry never stops a generation.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(enumerate(sinks))
        self._live: list[tuple[int, Sink]] = []
        self._log = get_logger()

    def open(self, run: RunRecord, /) -> None:
        """Open every sink for one run; raises :class:`PluginError` naming the sink's place in the profile."""
        self._live = []
        for index, sink in self._sinks:
            try:
                sink.open(run)
            except Exception as error:
                self.close(None)
                if isinstance(error, PluginError):
                    raise PluginError(f"sink.{index}.{error}") from error
                reason = f"{type(error).__name__}: {error}"
                raise PluginError(f"sink.{index}: {type(sink).__name__} cannot open: {reason}") from error
            self._live.append((index, sink))

    def token(self, record: TokenRecord, /) -> None:
        """Hand one token to every sink that still works."""
        failed: list[tuple[int, Sink]] = []
        for entry in self._live:
            try:
                entry[1].token(record)
            except Exception as error:  # noqa: BLE001 - whatever a sink raises, the generation goes on
                failed.append(entry)
                self._report(entry, error)
        for entry in failed:
            self._live.remove(entry)
            self._close(entry, None, quiet=True)

    def close(self, summary: RunSummary | None, /) -> None:
        """Close every sink that still works; may be called twice."""
        live, self._live = self._live, []
        for entry in live:
            self._close(entry, summary)

    def _close(self, entry: tuple[int, Sink], summary: RunSummary | None, *, quiet: bool = False) -> None:
        try:
            entry[1].close(summary)
        except Exception as error:  # noqa: BLE001 - whatever a sink raises, the generation goes on
            if not quiet:
                self._report(entry, error)

    def _report(self, entry: tuple[int, Sink], error: Exception) -> None:
        index, sink = entry
        path, reason = f"sink.{index}", f"{type(error).__name__}: {error}"
        option, equals, rest = str(error).partition(" = ")
        if isinstance(error, PluginError) and equals and option.startswith("options."):
            path, reason = f"{path}.{option}", rest
        self._log.warning("sink failed", path=path, sink=type(sink).__name__, reason=reason)
