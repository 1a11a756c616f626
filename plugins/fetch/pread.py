"""Fetcher ``pread``: 1 to 8 lanes of plain positioned reads; works wherever Python does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Fetcher, Options, ReadBatch, Ticket
from bmoe.errors import ReadError
from bmoe.native import io


class _Flight:
    """One batch: lanes take rows in order, lower stages first, and count down."""

    def __init__(self, reads: ReadBatch) -> None:
        self.nbytes = int(reads.length.sum())
        self.reads = reads
        self.rows = list(
            zip(
                reads.address.tolist(),
                reads.length.tolist(),
                reads.required.tolist(),
                reads.offset.tolist(),
                reads.shard.tolist(),
                reads.stage.tolist(),
                strict=True,
            )
        )
        self.next = 0
        self.pending = [0] * (int(reads.stage[-1]) + 1)
        for stage in reads.stage.tolist():
            self.pending[stage] += 1
        self.arrived = 0
        self.failed: tuple[int, int] | None = None
        self.done = threading.Condition()


class PreadFetcher:
    """``lanes`` threads that read; with one lane the caller reads and there is no thread."""

    def __init__(self, facts: Facts) -> None:
        """Open the files and start the lanes. Raises ModelError."""
        self._files = [io.open_data(path, direct=facts.fetch.direct) for path in facts.fetch.paths]
        self.direct = all(file.direct for file in self._files)
        self.note = next((file.note for file in self._files if file.note), "")
        self._flight: _Flight | None = None
        self._work: queue.SimpleQueue[_Flight | None] = queue.SimpleQueue()
        lanes = facts.fetch.lanes if facts.fetch.lanes > 1 else 0
        self._threads = [threading.Thread(target=self._lane, name=f"bmoe-pread-{i}", daemon=True) for i in range(lanes)]
        for thread in self._threads:
            thread.start()

    def submit(self, reads: ReadBatch, /) -> _Flight:
        """Hand the batch to the lanes."""
        self._drain()  # an interrupt may have kept the caller from waiting for the last one
        self._flight = flight = _Flight(reads)
        for _ in self._threads:
            self._work.put(flight)
        return flight

    def wait(self, ticket: Ticket, upto: int, /) -> int:
        """Wait for the stages up to ``upto``; with one lane, read them."""
        assert isinstance(ticket, _Flight)
        try:
            if not self._threads:
                while any(ticket.pending[: upto + 1]) and self._read_one(ticket):
                    pass
            with ticket.done:
                ticket.done.wait_for(lambda: ticket.failed is not None or not any(ticket.pending[: upto + 1]))
        except BaseException:
            self._drain()
            raise
        if ticket.failed is not None:
            self._drain()
            index, result = ticket.failed
            read = ticket.reads.row(index)
            raise ReadError(io.describe(self._files[read.shard], read.offset, read.length, result, read.required))
        return ticket.arrived

    def close(self) -> None:
        """Drain, stop the lanes, close the files."""
        self._drain()
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        for file in self._files:
            file.close()

    def _lane(self) -> None:
        while (flight := self._work.get()) is not None:
            while self._read_one(flight):
                pass

    def _read_one(self, flight: _Flight) -> bool:
        """Read the next row; False when there is none left or the batch has failed."""
        with flight.done:
            index = flight.next
            if index >= len(flight.rows) or flight.failed is not None:
                return False
            flight.next = index + 1
        address, length, required, offset, shard, stage = flight.rows[index]
        fd, got, count = self._files[shard].fd, 0, 0
        try:
            while got < required:
                # a read may be cut short by a signal or a device limit; only one without progress is a failure
                count = io.pread(fd, address + got, length - got, offset + got)
                if count <= 0:
                    break
                got += count
        finally:
            # also when the caller, who reads himself with one lane, is interrupted: nobody may wait for this row
            with flight.done:
                flight.pending[stage] -= 1
                flight.arrived += got
                if got < required and flight.failed is None:
                    flight.failed = (index, count if count < 0 else got)
                if flight.failed is not None or not flight.pending[stage]:
                    flight.done.notify_all()
        return True

    def _drain(self) -> None:
        """Stop handing out rows and wait until no lane is inside a read."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        with flight.done:
            untouched, flight.next = flight.rows[flight.next :], len(flight.rows)
            for row in untouched:
                flight.pending[row[-1]] -= 1
            flight.done.wait_for(lambda: not any(flight.pending))


def _build(options: Options, facts: Facts) -> PreadFetcher:
    return PreadFetcher(facts)


@hookimpl
def bmoe_fetchers() -> Sequence[Provider[Fetcher]]:
    """Portable; lanes come from ``fetch.lanes``."""
    return [Provider("pread", _build, summary="positioned reads in 1-8 threads, on any system")]
