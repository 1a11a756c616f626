"""Damages reads below every fetch plugin, by replacing the system calls of :mod:`bmoe.native.io`, and counts them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from bmoe.native import io, memory


class Faults:
    """``met`` says whether a fault was ever reached, ``in_flight`` how many reads were begun and have not ended.

    A fault is a negative errno, or the number of bytes after which the file seems to end.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """Stand between the plugins and the kernel until ``patch`` is undone."""
        self.in_flight = 0
        self.met = False
        self._fault: int | None = None
        self._nth = 0
        self._ended_at: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._interrupted = False
        self._pread, self._collect, self._submit = io.pread, io.AioCalls.collect, io.AioCalls.submit
        aio_destroy = io.aio_destroy
        patch.setattr(io, "pread", self._read)

        def submit(calls: io.AioCalls, pointers: int, count: int) -> int:
            return self._begin(calls, pointers, count)

        def collect(calls: io.AioCalls, least: int, most: int, events: int) -> int:
            return self._end(calls, least, most, events)

        patch.setattr(io.AioCalls, "submit", submit)
        patch.setattr(io.AioCalls, "collect", collect)

        def destroy(context: int) -> None:
            aio_destroy(context)  # the kernel waits for what is out
            self.in_flight = 0

        patch.setattr(io, "aio_destroy", destroy)

    @contextmanager
    def once(self, nth: int, fault: int) -> Iterator[None]:
        """The ``nth`` read from now fails."""
        self._nth, self._fault = nth, fault
        try:
            yield
        finally:
            self._nth, self._fault, self._ended_at = 0, None, None

    @contextmanager
    def interrupt(self, nth: int) -> Iterator[None]:
        """Ctrl-C comes just after the ``nth`` read from now, before anyone has seen its result."""
        self._interrupted = True
        try:
            with self.once(nth, 0):
                yield
        finally:
            self._interrupted = False

    @contextmanager
    def always(self, fault: int) -> Iterator[None]:
        """Every read fails."""
        self._nth, self._fault = -1, fault
        try:
            yield
        finally:
            self._nth, self._fault = 0, None

    @contextmanager
    def never(self) -> Iterator[None]:
        """Within :meth:`always`: reads succeed."""
        fault, self._fault = self._fault, None
        try:
            yield
        finally:
            self._fault = fault

    def _next(self) -> int | None:
        """The fault of the next read, if it has one; call it with the lock held."""
        if self._fault is None:
            return None
        if self._nth > 0:
            self._nth -= 1
            if self._nth:
                return None
            self._nth = 0
        elif self._nth == 0:
            return None
        self.met = True
        return self._fault

    def _read(self, fd: int, address: int, nbytes: int, offset: int) -> int:
        with self._lock:
            self.in_flight += 1
            if self._ended_at is not None and self._ended_at == (fd, offset):
                fault: int | None = 0  # where the file seemed to end, it still ends
            else:
                fault = self._next()
                if fault is not None and fault > 0:
                    self._ended_at = (fd, offset + fault)
        try:
            if fault is None or self._interrupted:
                count = self._pread(fd, address, nbytes, offset)
                if fault is not None:
                    raise KeyboardInterrupt
                return count
            return fault
        finally:
            with self._lock:
                self.in_flight -= 1

    def _begin(self, calls: io.AioCalls, pointers: int, count: int) -> int:
        taken = self._submit(calls, pointers, count)
        self.in_flight += max(taken, 0)
        return taken

    def _end(self, calls: io.AioCalls, least: int, most: int, at: int) -> int:
        # one at a time while a fault is due, so that others are still out when it comes
        count = self._collect(calls, least, most if self._fault is None else least, at)
        self.in_flight -= count
        events = np.frombuffer(memory.view(at, most * 32), dtype=io.EVENT_DTYPE)
        for index in range(count):
            fault = self._next()
            if fault is not None and self._interrupted:
                raise KeyboardInterrupt
            if fault is not None:
                events["result"][index] = fault
        return count
