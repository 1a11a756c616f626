"""Damages reads below every fetch plugin, by replacing the system calls of :mod:`bmoe.native`, and counts them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from bmoe.native import aio, io, memory, uring

Begun = tuple[int, int, int, int]
"""One read that was handed over: descriptor, address, length, offset."""


class Faults:
    """Stands between the plugins and the kernel.

    ``met`` says whether a fault was ever reached, ``begun`` which reads were handed over, in order, and ``most`` how
    many of them were in flight together. A fault is a negative errno, or the number of
    bytes after which the file seems to end.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """Stand there until ``patch`` is undone."""
        self.most = 0
        self.begun: list[Begun] = []
        self.met = False
        self._fault: int | None = None
        self._nth = 0
        self._ended_at: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._interrupted = False
        self._cut = False
        self._out: dict[int, Begun] = {}
        self._pread = io.pread
        patch.setattr(io, "pread", self._read)
        self._below_aio(patch)
        self._below_uring(patch)

    def _below_aio(self, patch: pytest.MonkeyPatch) -> None:
        real_submit, real_collect, real_destroy = aio.AioCalls.submit, aio.AioCalls.collect, aio.destroy

        def submit(calls: aio.AioCalls, pointers: int, count: int) -> int:
            asked = np.frombuffer(memory.view(pointers, 8 * count), dtype=np.uint64).tolist()
            taken = real_submit(calls, pointers, count)
            for at in asked[: max(taken, 0)]:
                block = np.frombuffer(memory.view(at, 64), dtype=np.dtype(aio.IOCB_DTYPE))[0]
                self._begin(int(block["data"]), tuple(int(block[n]) for n in ("fd", "buffer", "nbytes", "offset")))
            return taken

        def collect(calls: aio.AioCalls, least: int, most: int, at: int) -> int:
            count = real_collect(calls, *self._patience(least, most), at)
            events = np.frombuffer(memory.view(at, most * 32), dtype=aio.EVENT_DTYPE)
            for index in range(count):
                events["result"][index] = self._end(int(events["data"][index]), int(events["result"][index]))
            return count

        def destroy(context: int) -> None:
            real_destroy(context)  # the kernel waits for what is out
            self._out.clear()

        patch.setattr(aio.AioCalls, "submit", submit)
        patch.setattr(aio.AioCalls, "collect", collect)
        patch.setattr(aio, "destroy", destroy)

    def _below_uring(self, patch: pytest.MonkeyPatch) -> None:
        real_submit, real_collect, real_drain = uring.Ring.submit, uring.Ring.collect, uring.Ring.drain

        def submit(ring: uring.Ring, entries: Any, first: int, count: int) -> int:
            taken = real_submit(ring, entries, first, count)
            for entry in entries[first : first + max(taken, 0)]:
                place = tuple(int(entry[n]) for n in ("fd", "address", "length", "offset"))
                self._begin(int(entry["identity"]), place)
            return taken

        def collect(ring: uring.Ring, least: int) -> list[tuple[int, int]]:
            return [(identity, self._end(identity, result)) for identity, result in real_collect(ring, least)]

        def drain(ring: uring.Ring) -> None:
            real_drain(ring)
            self._out.clear()

        patch.setattr(uring.Ring, "submit", submit)
        patch.setattr(uring.Ring, "collect", collect)
        patch.setattr(uring.Ring, "drain", drain)

    @property
    def in_flight(self) -> int:
        """Reads that were begun and have not ended."""
        return len(self._out)

    def within(self, region: memory.Region) -> int:
        """Those of them that write into ``region``."""
        end = region.address + region.nbytes
        return sum(region.address <= place[1] < end for place in list(self._out.values()))

    @contextmanager
    def cut(self, nth: int, count: int) -> Iterator[None]:
        """The ``nth`` read from now ends after ``count`` bytes, and the file goes on."""
        self._cut = True
        try:
            with self.once(nth, count):
                yield
        finally:
            self._cut = False

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

    def _patience(self, least: int, most: int) -> tuple[int, int]:
        """One at a time while a fault is due, so that others are still out when it comes."""
        return (least, most) if self._fault is None or not least else (1, 1)

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

    def _begin(self, identity: int, place: Any) -> None:
        with self._lock:
            self.begun.append(place)
            self._out[identity] = place
            self.most = max(self.most, len(self._out))

    def _end(self, identity: int, result: int) -> int:
        with self._lock:
            place = self._out.pop(identity, (-1, 0, 0, 0))
            fault = self._next()
        return result if fault is None else self._struck(fault, place, result)

    def _struck(self, fault: int, place: Begun, result: int) -> int:
        fd, address, _, offset = place
        if self._interrupted:
            raise KeyboardInterrupt
        if fault > 0 and self._cut:
            memory.fill(address + fault, 0xAA, max(0, result - fault))
        elif fault > 0:
            self._ended_at = (fd, offset + fault)
        return fault

    def _read(self, fd: int, address: int, nbytes: int, offset: int) -> int:
        place = (fd, address, nbytes, offset)
        identity = -address  # what is read by threads and what the kernel reads do not meet
        self._begin(identity, place)
        end = self._ended_at
        if end is not None and end[0] == fd and offset <= end[1] < offset + nbytes:
            result = end[1] - offset  # where the file seemed to end, it still ends
        else:
            result = self._pread(fd, address, nbytes, offset)
        return self._end(identity, result)
