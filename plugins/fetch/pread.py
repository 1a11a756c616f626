"""Fetcher ``pread``: 1 to 8 lanes, threads with plain positioned reads; works wherever Python does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Fetcher, Options
from bmoe.native import io
from bmoe_plugins.fetch._queue import QueueOptions, ReadQueue, capacity_for, open_files

_Work = tuple[int, int, int, int, int]
_Ended = tuple[int, Any]


class PreadOptions(Options):
    """``fetch.lanes`` says how many reads are in flight."""

    piece_kb: int = Field(default=0, ge=0, le=1 << 20, description="KiB of the pieces of a small batch; 0 = whole")
    ahead: int = Field(default=2, ge=0, le=1024, description="pieces of read-ahead in flight, at most")


class PreadDevice:
    """``lanes`` threads that take reads from a queue in order; started with the first read."""

    def __init__(self, lanes: int, capacity: int) -> None:
        self.capacity, self._lanes = capacity, lanes
        self._threads: list[threading.Thread] = []
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._skip = False

    def prepare(self, identity: int, pieces: Sequence[Any]) -> Any:
        """One tuple per piece."""
        fd, address, length, offset = (column.tolist() for column in pieces[:4])
        return list(zip(range(identity, identity + len(fd)), fd, address, length, offset, strict=True))

    def start(self, prepared: Any, first: int, count: int) -> int:
        """Hand them to the lanes."""
        if not self._threads:
            for index in range(self._lanes):
                thread = threading.Thread(target=self._lane, name=f"bmoe-pread-{index}", daemon=True)
                thread.start()
                self._threads.append(thread)
        for work in prepared[first : first + count]:
            self._work.put(work)
        return count

    def collect(self, least: int) -> list[tuple[int, int]]:
        """Take what the lanes have ended."""
        ended = [self._ended.get() for _ in range(least)]
        while not self._ended.empty():
            ended.append(self._ended.get())
        for _, result in ended:
            if isinstance(result, BaseException):
                raise result
        return ended

    def restart(self) -> None:
        """Let the lanes end the reads that they are in, and no other."""
        self._skip = True
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._work, self._ended, self._skip = queue.SimpleQueue(), queue.SimpleQueue(), False

    def close(self) -> None:
        """Stop the lanes."""
        self.restart()

    def _lane(self) -> None:
        while (work := self._work.get()) is not None:
            identity, *read = work
            if not self._skip:
                try:
                    self._ended.put((identity, io.pread(*read)))
                except BaseException as error:  # noqa: BLE001 - raised where it is collected; nobody waits for ever
                    self._ended.put((identity, error))


class PreadFetcher(ReadQueue):
    """The queue over reader threads."""

    def __init__(self, facts: Facts, options: PreadOptions = PreadOptions()) -> None:  # noqa: B008 - it is frozen
        """Open the files. Raises ModelError."""
        lanes = facts.fetch.lanes
        shape = QueueOptions(depth=lanes, piece_kb=options.piece_kb, ahead=options.ahead)
        super().__init__(open_files(facts), lambda: PreadDevice(lanes, capacity_for(facts)), shape)


def _build(options: PreadOptions, facts: Facts) -> PreadFetcher:
    return PreadFetcher(facts, options)


@hookimpl
def bmoe_fetchers() -> Sequence[Provider[Fetcher]]:
    """Portable; lanes come from ``fetch.lanes``."""
    return [Provider("pread", _build, PreadOptions, summary="positioned reads in 1-8 threads, on any system")]
