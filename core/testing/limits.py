"""Runs a command with less memory than the machine has, by whatever way the machine offers.

A control group of version 2 or of version 1, made below the group that this process is in or beside it, or a transient
scope of systemd. The limit covers the page cache that the command fills: what it reads through the cache counts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bmoe.machine import control_groups

_JOIN = 'echo $$ > "$0" && exec "$@"'
_LIMITS = {"cgroup v2": "memory.max", "cgroup v1": "memory.limit_in_bytes"}
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit that is in force: ``kind`` says by what; ``group`` is its folder, None with systemd."""

    kind: str
    nbytes: int
    group: Path | None

    def command(self, command: Sequence[str]) -> list[str]:
        """``command`` as it is to be started so that it, and what it starts, is limited."""
        if self.group is not None:
            return ["sh", "-c", _JOIN, str(self.group / "cgroup.procs"), *command]
        limits = [f"--property=MemoryMax={self.nbytes}", "--property=MemorySwapMax=0"]
        return ["systemd-run", "--scope", "--quiet", "--collect", *limits, "--", *command]

    def read(self, name: str) -> int | None:
        """A number of the group, such as ``memory.max_usage_in_bytes``; None where there is none."""
        try:
            return int((self.group / name).read_text()) if self.group is not None else None
        except (OSError, ValueError):
            return None

    @property
    def peak_bytes(self) -> int | None:
        """The most that was charged, page cache included; None where it is not told."""
        peaks = (self.read(name) for name in ("memory.peak", "memory.max_usage_in_bytes"))
        return next((peak for peak in peaks if peak is not None), None)


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[MemoryLimit | None]:
    """A limit of ``nbytes`` for the commands started inside the block; None where this machine lets nobody set one."""
    for folder in control_groups():
        limit = _made(folder, nbytes)
        if limit is None:
            continue
        try:
            if _works(limit):
                yield limit
                return
        finally:
            _removed(limit)
    scope = MemoryLimit("systemd-run", nbytes, None)
    yield scope if shutil.which("systemd-run") and _works(scope) else None


def let_everybody_read(path: Path) -> None:
    """Let a process without privileges read a file of ours, through the folders of ours above it."""
    path.chmod(0o644)
    for folder in path.parents:
        if folder == Path(folder.anchor) or folder.stat().st_uid != os.getuid():
            break
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(folder.stat().st_mode | 0o055)


def _made(folder: Path, nbytes: int) -> MemoryLimit | None:
    """A new group below ``folder`` with the limit set, or None if that is not allowed or not possible there."""
    if not any((folder / name).exists() for name in ("cgroup.controllers", "memory.limit_in_bytes")):
        return None
    group = folder / f"bmoe-limit-{os.getpid()}-{next(_NUMBERS)}"
    try:
        group.mkdir()
    except OSError:
        return None
    for kind, name in _LIMITS.items():
        with contextlib.suppress(OSError):
            if (group / name).exists():
                (group / name).write_text(str(nbytes))
                return MemoryLimit(kind, nbytes, group)
    group.rmdir()
    return None


def _works(limit: MemoryLimit) -> bool:
    """Whether a process really runs in it."""
    try:
        done = subprocess.run(limit.command(["true"]), capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _removed(limit: MemoryLimit) -> None:
    """Take the group away; a process that has just ended may still count as being in it."""
    if limit.group is None:
        return
    with contextlib.suppress(OSError):
        (limit.group / "memory.force_empty").write_text("0")
    for _ in range(100):
        with contextlib.suppress(OSError):
            limit.group.rmdir()
            return
        time.sleep(0.02)
