"""The routing-time sequence: what happens between a layer's router and its expert matmuls, one function per step."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bmoe.contracts import ExpertKey, Fetcher, ReadBatch
from bmoe.native.evalhook import Seam
from bmoe.store import Store


@dataclass(slots=True)
class StreamCounters:
    """Sums since open. ``wait_s`` is spent waiting for reads, ``manage_s`` on everything else inside the callback."""

    read_bytes: int = 0
    reads: int = 0
    wait_s: float = 0.0
    manage_s: float = 0.0


class Stream:
    """Connects the eval hook to store and fetcher. All calls come from the thread that decodes."""

    def __init__(self, seam: Seam, store: Store, fetcher: Fetcher) -> None:
        self.seam, self.store, self.fetcher = seam, store, fetcher
        self.counters = StreamCounters()
        self._last_stage = max(len(b.projections) for b in seam.banks) - 1
        seam.handler = self.route

    def route(self, bank: int, keys: list[ExpertKey]) -> None:
        """One routing with an entry missing: rank, make room, read, mark valid. Raises what the fetcher raises."""
        began = time.perf_counter()
        self.flush()
        batch = self.store.stage(bank, keys)
        waited = 0.0
        if batch is not None:
            waiting = time.perf_counter()
            try:
                self._read(batch)
                waited = time.perf_counter() - waiting
                self.store.commit()
            except BaseException:
                self.store.abandon()
                raise
        self.counters.wait_s += waited
        self.counters.manage_s += time.perf_counter() - began - waited

    def flush(self) -> None:
        """Tell the store of routings that were all hits, which the hook only logged."""
        touched = self.store.touched
        for keys in self.seam.drain():
            touched(keys)

    def settle(self) -> None:
        """After a decode, failed or not: every touch is accounted and the store is within its budget."""
        began = time.perf_counter()
        self.flush()
        self.store.settle()
        self.counters.manage_s += time.perf_counter() - began

    def _read(self, batch: ReadBatch) -> None:
        ticket = self.fetcher.submit(batch)
        self.counters.read_bytes += self.fetcher.wait(ticket, self._last_stage)
        self.counters.reads += len(batch)
