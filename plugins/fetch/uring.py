"""Fetcher ``uring``: io_uring by system call, no threads, no copies; asynchronous through the page cache too.

Files are not registered with the ring: that saves a reference count per read, nothing beside what a read of 256 KiB
costs. A kernel thread that polls (SQPOLL) would take a core from the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Fetcher
from bmoe.native import uring
from bmoe_plugins.fetch._queue import QueueOptions, ReadQueue, capacity_for, open_files

_ENTRY = np.dtype(uring.ENTRY_DTYPE)


class UringDevice:
    """One ring."""

    def __init__(self, capacity: int) -> None:
        """Raises NativeError if the kernel grants no ring."""
        self._ring = uring.Ring(capacity)
        self.capacity = self._ring.entries

    def prepare(self, identity: int, pieces: Sequence[Any]) -> Any:
        """Submission entries, as they are copied into the ring."""
        fd, address, length, offset = pieces[:4]
        count = len(fd)
        entries = np.zeros(count, dtype=_ENTRY)
        entries["opcode"], entries["identity"] = uring.READ, np.arange(identity, identity + count)
        entries["fd"], entries["address"], entries["length"], entries["offset"] = fd, address, length, offset
        return entries

    def start(self, prepared: Any, first: int, count: int) -> int:
        """One io_uring_enter."""
        return self._ring.submit(prepared, first, count)

    def collect(self, least: int) -> list[tuple[int, int]]:
        """One io_uring_enter, two to ask without waiting."""
        return self._ring.collect(least)

    def restart(self) -> None:
        """Wait by the kernel's own counts."""
        self._ring.drain()

    def close(self) -> None:
        """Wait, since closing a ring does not; then unmap and close."""
        self._ring.drain()
        self._ring.close()


def _build(options: QueueOptions, facts: Facts) -> ReadQueue:
    return ReadQueue(open_files(facts), lambda: UringDevice(capacity_for(facts)), options)


@hookimpl
def bmoe_fetchers() -> Sequence[Provider[Fetcher]]:
    """Linux 5.6 or later, where it is not switched off."""
    summary = "Linux io_uring: reads queued in a ring shared with the kernel, no threads"
    return [Provider("uring", _build, QueueOptions, available=uring.missing, summary=summary)]
