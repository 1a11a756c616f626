"""The file that a trace is written to: whole lines only, and nothing that was there before is lost to a failed run."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable
from typing import BinaryIO

from bmoe.log import get_logger
from bmoe.replay.route_trace import TraceError

try:
    import fcntl
except ImportError:  # pragma: no cover - no such locks on this system
    fcntl = None  # type: ignore[assignment]

MARKS = (b"# route_trace v", b"# io_trace v", b"# compute_trace v", b"PAR1")
"""How a trace begins; a file that begins otherwise is never replaced by one."""


class TracePlace:
    """Where a trace goes: beside ``path`` as ``path.part`` until :meth:`keep`, so that an interrupt leaves the old one.

    A device such as /dev/full is written to as it is. Raises :class:`TraceError` without the path in front: the
    caller knows what the person wrote.
    """

    def __init__(self, path: str) -> None:
        self.path, self.part = path, path
        try:
            mode = os.stat(path).st_mode
        except OSError:
            mode = stat.S_IFREG
        if stat.S_ISREG(mode):
            self._may_replace()
            self.part = f"{path}.part"
        elif not stat.S_ISCHR(mode):
            raise TraceError("is no file; choose another place")
        self.file: BinaryIO = self._open()

    def keep(self) -> None:
        """What was written is the trace now; raises OSError."""
        self.file.close()
        if self.part != self.path:
            os.replace(self.part, self.path)

    def drop(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(OSError):
            self.file.close()
        if self.part != self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.part)

    def _open(self) -> BinaryIO:
        try:
            descriptor = os.open(self.part, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TraceError(f"cannot be written ({reason}); choose another place") from error
        file = os.fdopen(descriptor, "wb", buffering=0)
        if self.part != self.path:
            if fcntl is not None:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    file.close()
                    raise TraceError("is being written by another run; choose another place") from error
            os.ftruncate(descriptor, 0)
        return file

    def _may_replace(self) -> None:
        try:
            with open(self.path, "rb") as file:
                head = file.read(32)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TraceError(f"cannot be written ({reason}); choose another place") from error
        if head and not head.startswith(MARKS):
            raise TraceError("exists and is no trace, so it is not replaced; choose another place")


class TraceLines:
    """A trace of text lines. They are held back until :meth:`flush` and then written as whole lines.

    A write that fails ends the trace, not the run: it is logged once, ``failure`` says it, and what was written whole
    stays in the part file, which can be read.
    """

    def __init__(self, place: TracePlace, header: Iterable[str], failed: Callable[[str], None] | None = None) -> None:
        self._place, self._failed = place, failed
        self._held: list[str] = list(header)
        self._size = 0
        self.rows = 0
        self.failure = ""
        self.append = self._held.append

    def flush(self, rows: int) -> None:
        """Write what is held, ``rows`` rows of it."""
        if not self._held or self.failure:
            self._held.clear()
            return
        data = "".join(self._held).encode("utf-8")
        self._held.clear()
        try:
            done = 0
            while done < len(data):
                done += self._place.file.write(data[done:]) or 0
        except OSError as error:
            with contextlib.suppress(OSError):  # no half line
                os.ftruncate(self._place.file.fileno(), self._size)
            self.fail(error)
            return
        self._size += len(data)
        self.rows += rows

    def discard(self) -> None:
        """Forget what is held: it is of a decode that did not happen."""
        self._held.clear()

    def fail(self, error: OSError) -> None:
        """The trace ends here."""
        self.failure = said(self._place, error, self._size)
        report(self._place.path, self.failure, self._failed)

    def close(self) -> None:
        """Put the trace in its place; without a row there is none, and an older file stays."""
        self.flush(0)
        if self.failure and self._size:
            with contextlib.suppress(OSError):
                self._place.file.close()
        elif self.failure or not self.rows:
            self._place.drop()
        else:
            try:
                self._place.keep()
            except OSError as error:
                self.fail(error)


def said(place: TracePlace, error: OSError, kept: int) -> str:
    """One line on a trace that could not be written on, with what is left of it."""
    left = f"; what was written is in {place.part}" if kept and place.part != place.path else ""
    return f"{place.path}: the trace ends ({error.strerror or error}); make room there or choose another place{left}"


def report(path: str, failure: str, failed: Callable[[str], None] | None) -> None:
    """Say it in one line of the log, or to who asked for it."""
    if failed is not None:
        failed(failure)
    else:
        get_logger().error("trace failed", path=path, reason=failure)
