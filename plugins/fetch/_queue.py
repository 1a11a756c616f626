"""What all fetchers share: the queue in front of a device, its order, and the account of what arrived.

A device (:class:`Device`) only starts reads and says which have ended. This module decides which come first: of the
batch that is waited for, a bounded number at a time, so that its lower stages arrive early; when the wait is over, all
that is left of what was demanded, since nobody is here to do it while the model computes; last, and few, read-ahead.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from pydantic import Field

from bmoe.contracts import Facts, Options, ReadBatch, Ticket
from bmoe.errors import ReadError
from bmoe.native import io, memory

_LARGEST = 1 << 30  # bytes of one read; system calls cut longer ones short
_AGAIN = (-errno.EINTR, -errno.EAGAIN)
_TRIES = 1000  # a drive that never answers otherwise is broken, and must not be asked for ever


class QueueOptions(Options):
    """How the queue is shaped. The defaults were measured; see docs/reference/fetchers.md."""

    depth: int = Field(default=8, ge=1, le=1024, description="reads in flight while a batch is waited for")
    piece_kb: int = Field(default=0, ge=0, le=1 << 20, description="KiB of the pieces of a small batch; 0 = whole")
    ahead: int = Field(default=12, ge=0, le=1024, description="pieces of read-ahead in flight, at most")


class Device(Protocol):
    """Where reads happen. A read has an identity: one 64-bit integer, not 0."""

    capacity: int
    """Reads that can be in flight together."""

    def prepare(self, identity: int, pieces: Sequence[Any]) -> Any:
        """The form in which :meth:`start` takes pieces; columns fd, address, length, offset; identities count up."""

    def start(self, prepared: Any, first: int, count: int) -> int:
        """Start ``count`` pieces from ``first``: how many were taken, or -errno if not one was."""

    def collect(self, least: int) -> list[tuple[int, int]]:
        """Wait for ``least`` reads to end; identity and result (bytes or -errno) of each that has ended."""

    def restart(self) -> None:
        """Wait until nothing is in flight; what has ended and was not collected is forgotten."""

    def close(self) -> None:
        """Wait until nothing is in flight and release everything."""


def open_files(facts: Facts) -> list[io.DataFile]:
    """The shards, direct where asked and possible. Raises ModelError, and none is open then."""
    opened: list[io.DataFile] = []
    try:
        for path in facts.fetch.paths:
            opened.append(io.open_data(path, direct=facts.fetch.direct))  # noqa: PERF401 - closed if a later one fails
    except BaseException:
        for file in opened:
            file.close()
        raise
    return opened


def capacity_for(facts: Facts) -> int:
    """Reads that a device should hold: the largest batch whole, and some of others."""
    return min(4096, max(256, facts.fetch.batch + 64))


class _Flight:
    """One batch in pieces, lower stages first. ``got`` is the truth, all other counts follow from it."""

    __slots__ = (
        "ahead", "arrived", "before", "blocks", "columns", "failed", "got", "last", "next", "out", "pending", "reads",
        "required", "row", "serial", "size", "stage",
    )  # fmt: skip

    def __init__(self, reads: ReadBatch, columns: tuple[Any, ...], row: Any, ahead: bool) -> None:
        self.reads, self.columns, self.row, self.ahead = reads, columns, row, ahead
        self.last = int(reads.stage[-1])
        self.arrived = self.serial = 0
        self.blocks: Any = None
        self.failed: tuple[int, int] | None = None
        self._begin()

    def rewind(self) -> None:
        """Begin anew with the pieces that are not known to have arrived; none of them is started."""
        self.arrived = self.before + sum(result for result in self.got if result is not None)
        keep = [index for index, result in enumerate(self.got) if result is None]
        self.columns = tuple(column[keep] for column in self.columns)
        self.row = self.row if self.row is None else self.row[keep]
        self._begin()

    def _begin(self) -> None:
        self.before = self.arrived
        self.required, self.stage = self.columns[4].tolist(), self.columns[5].tolist()
        self.size = len(self.stage)
        self.got: list[int | None] = [None] * self.size
        self.pending = np.bincount(self.columns[5], minlength=self.last + 1).tolist()
        self.next = self.out = 0

    def lacking(self, upto: int) -> int:
        """Pieces of the stages up to ``upto`` that have not arrived."""
        return sum(self.pending[: upto + 1]) if upto >= 0 else 0


class QueueTicket:
    """What ``submit`` returns. One that is dropped before its reads have ended is cancelled."""

    __slots__ = ("_lost", "flight", "nbytes")

    def __init__(self, nbytes: int, flight: _Flight, lost: list[_Flight]) -> None:
        self.nbytes, self.flight, self._lost = nbytes, flight, lost

    def __del__(self) -> None:
        if self.flight.out or self.flight.next < self.flight.size:
            self._lost.append(self.flight)


class _Account:
    """An exception may come between any two steps, Ctrl-C for one: then nothing is believed but what each read gave."""

    __slots__ = ("_queue", "flight")

    def __init__(self, queue: ReadQueue, flight: _Flight | None) -> None:
        self._queue, self.flight = queue, flight

    def __enter__(self) -> _Account:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._queue.torn = False
        else:
            self._queue.mend(self.flight)


class ReadQueue:
    """A :class:`~bmoe.contracts.Fetcher` over a :class:`Device`. All calls come from one thread at a time."""

    def __init__(self, opened: Sequence[io.DataFile], device: Callable[[], Device], options: QueueOptions) -> None:
        """The files are this queue's from here on, also if there is no device, which raises NativeError."""
        try:
            self._device = device()
        except BaseException:
            for file in opened:
                file.close()
            raise
        self._files, self._closed = opened, False
        self.direct = all(file.direct for file in opened)
        self.note = next((file.note for file in opened if file.note), "")
        self._depth = min(options.depth, self._device.capacity)
        self._piece, self._ahead = memory.round_up(options.piece_kb * 1024), options.ahead
        self._descriptors = np.array([file.fd for file in opened], dtype=np.int64)
        self._flights: dict[int, _Flight] = {}  # those with pieces that have not ended, in order of submission
        self._lost: list[_Flight] = []
        self._serial = self._out = self._out_ahead = 0
        self._used = None if self.direct else io.UsedPages(opened)
        self.torn = False

    # ---- the contract

    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Ticket:
        """Start as many reads as may be in flight; the rest follows in later calls."""
        with self._account() as account:
            while self._lost:
                self._abandon(self._lost[-1])
                self._lost.pop()
            # from here on an interrupt gives this batch up: nobody would have a ticket to wait for it or to cancel it
            account.flight = flight = self._split(reads, ahead)
            ticket = QueueTicket(int(reads.length.sum()), flight, self._lost)
            self._enter(flight)
            if ahead:
                self._start_ahead()
            else:
                self._start(flight, self._depth)
        return ticket

    def wait(self, ticket: Ticket, upto: int, /) -> int:
        """Collect until the stages up to ``upto`` are complete, then hand over what is left."""
        flight: _Flight = ticket.flight  # type: ignore[attr-defined]
        if flight.serial not in self._flights:
            return self._result(flight)
        with self._account(flight):
            self._promote(flight)
            while flight.failed is None and (lacking := flight.lacking(upto)):
                self._start(flight, self._depth)
                # every piece that is lacking has yet to end: be woken once for all of them, or in time to refill
                refill = self._depth // 4 if flight.next < flight.size else lacking
                self._collect(max(1, min(lacking, flight.out, refill)))
            if flight.failed is not None:
                self._abandon(flight)
            self._hand_over()
        return self._result(flight)

    def ready(self, ticket: Ticket, upto: int, /) -> bool:
        """Take what has ended, hand over what there is room for, and say whether ``wait`` would return at once."""
        flight: _Flight = ticket.flight  # type: ignore[attr-defined]
        if flight.serial in self._flights:
            with self._account():
                if self._out:
                    self._collect(0)
                self._hand_over()
        return not flight.out if flight.failed is not None else not flight.lacking(upto)

    def cancel(self, ticket: Ticket, /) -> None:
        """Drop what was not started, wait for what was."""
        flight: _Flight = ticket.flight  # type: ignore[attr-defined]
        with self._account(flight):
            self._abandon(flight)

    def close(self) -> None:
        """Wait for what is in flight, then release device and files. May be called twice."""
        if not self._closed:
            self._closed = True
            self._device.close()
            self._flights.clear()
            if self._used is not None:
                self._used.drop()
        for file in self._files:
            file.close()

    # ---- order

    def _split(self, reads: ReadBatch, ahead: bool) -> _Flight:
        """Cut rows into pieces of whole pages where they are too few, or too long, to fill the device."""
        fd, count = self._descriptors[reads.shard], len(reads)
        columns = (fd, reads.address, reads.length, reads.offset, reads.required, reads.stage)
        longest = int(reads.length.max())
        few = self._piece and (ahead or count < self._depth) and longest > self._piece
        if not few and longest <= _LARGEST:
            return _Flight(reads, columns, None, ahead)
        goal = self._piece if few else _LARGEST
        if few and not ahead:  # no more pieces than fill the device
            goal = max(goal, int(reads.length.sum()) // self._depth)
        parts = -(-reads.length // min(goal, _LARGEST))
        even = (-(-reads.length // parts) + memory.PAGE - 1) & -memory.PAGE
        parts = -(-reads.length // even)
        row = np.repeat(np.arange(count), parts)
        begin = (np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)) * even[row]
        length = np.minimum(even[row], reads.length[row] - begin)
        required = np.clip(reads.required[row] - begin, 0, length)
        columns = (fd[row], reads.address[row] + begin, length, reads.offset[row] + begin, required, reads.stage[row])
        return _Flight(reads, columns, row, ahead)

    def _enter(self, flight: _Flight) -> None:
        self._serial += 1
        flight.serial = self._serial
        flight.blocks = self._device.prepare(self._serial << 32, flight.columns)
        self._flights[self._serial] = flight

    def _promote(self, flight: _Flight) -> None:
        if flight.ahead:
            flight.ahead = False
            self._out_ahead -= flight.out

    def _start(self, flight: _Flight, limit: int) -> None:
        """Start pieces of ``flight`` up to ``limit``, then of other demanded batches if few are in flight."""
        room = min(limit - flight.out, self._device.capacity - self._out)
        if room > 0 and flight.next < flight.size:
            self._launch(flight, room)
        if self._out < limit and len(self._flights) > 1:
            self._start_rest(limit)

    def _start_rest(self, limit: int) -> None:
        for flight in list(self._flights.values()):
            if not flight.ahead and flight.next < flight.size and self._out < limit:
                self._launch(flight, limit - self._out)

    def _start_ahead(self) -> None:
        """Read-ahead goes last: only when all that was demanded has arrived, and never more than a little."""
        limit = self._device.capacity
        if self._out > self._out_ahead:
            return
        for flight in list(self._flights.values()):
            room = min(self._ahead - self._out_ahead, limit - self._out)
            if room <= 0 or (not flight.ahead and flight.next < flight.size and flight.failed is None):
                return
            if flight.ahead and flight.next < flight.size:
                self._launch(flight, room)

    def _hand_over(self) -> None:
        self._start_rest(self._device.capacity)
        self._start_ahead()

    def _launch(self, flight: _Flight, most: int) -> None:
        first, end = flight.next, min(flight.size, flight.next + most)
        while flight.failed is None and flight.next < end:
            taken = self._device.start(flight.blocks, flight.next, end - flight.next)
            if taken <= 0:
                if taken not in (0, *_AGAIN) or not self._out:
                    flight.failed = (flight.next, taken)
                break
            flight.next += taken
            flight.out += taken
            self._out += taken
        if flight.ahead:
            self._out_ahead += flight.next - first

    # ---- account

    def _collect(self, least: int) -> None:
        flights = self._flights
        for identity, result in self._device.collect(least):
            flight, index = flights[identity >> 32], identity & 0xFFFFFFFF
            if result < flight.required[index]:
                result = self._finish(flight, index, result)
            flight.got[index] = result
            flight.out -= 1
            self._out -= 1
            if flight.ahead:
                self._out_ahead -= 1
            if result < flight.required[index]:
                flight.failed = flight.failed or (index, result)
                continue
            flight.arrived += result
            flight.pending[flight.stage[index]] -= 1
            if not flight.out and flight.next >= flight.size:
                self._leave(flight)

    def _leave(self, flight: _Flight) -> None:
        if self._flights.pop(flight.serial, None) is not None and self._used is not None:
            reads = flight.reads
            self._used.add(reads.shard, reads.offset, reads.length)

    def _finish(self, flight: _Flight, index: int, result: int) -> int:
        """A read may be cut short by a signal or a limit of the device; only one without progress is a failure."""
        fd, address, length, offset, required, _ = (int(column[index]) for column in flight.columns)
        for _ in range(_TRIES):
            if not (0 < result < required or result in _AGAIN):
                break
            begin = memory.round_down(max(result, 0))
            count = io.pread(fd, address + begin, length - begin, offset + begin)
            if count in _AGAIN:
                continue
            if count < 0:
                return count
            if begin + count <= result:
                break
            result = begin + count
        return result

    def _abandon(self, flight: _Flight) -> None:
        """Nothing more of it is started; afterwards nothing of it is in flight."""
        flight.size = flight.next
        while flight.out:
            self._collect(1)
        self._leave(flight)

    def _result(self, flight: _Flight) -> int:
        if flight.failed is None:
            return flight.arrived
        index, result = flight.failed
        row = index if flight.row is None else int(flight.row[index])
        read = flight.reads.row(row)
        if result >= 0 and flight.row is not None:
            result += int(flight.columns[3][index]) - read.offset
        raise ReadError(io.describe(self._files[read.shard], read.offset, read.length, result, read.required))

    # ---- interrupts

    def _account(self, flight: _Flight | None = None) -> _Account:
        if self.torn:  # an interrupt came while the one before was being dealt with
            self.mend(None)
        self.torn = True
        return _Account(self, flight)

    def mend(self, dropped: _Flight | None) -> None:
        """Wait for the device, then read again whatever is not known to have arrived; ``dropped`` is given up."""
        self._device.restart()
        self._out = self._out_ahead = 0
        for flight in list(self._flights.values()):
            flight.out = 0
            del self._flights[flight.serial]
            if flight is dropped or flight.failed is not None:
                flight.next = flight.size
                continue
            flight.rewind()
            if flight.size:
                self._enter(flight)
        self.torn = False
