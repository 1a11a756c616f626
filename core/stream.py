"""The routing-time sequence: what happens between a layer's router and its expert matmuls, one function per step.

With overlap the reads of a layer are waited for one projection at a time: those of the first when it was routed, those
of each next one when the product before it was computed. While it is computed, the later ones are still being read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bmoe.contracts import ExpertKey, Fetcher, ReadBatch, Ticket
from bmoe.native.evalhook import Seam
from bmoe.store import Store


@dataclass(slots=True)
class StreamCounters:
    """Sums since open. ``wait_s`` is spent waiting for reads, ``manage_s`` on everything else inside the callback.

    ``overlapped`` counts products that were computed while reads of their layer were still out.
    """

    read_bytes: int = 0
    reads: int = 0
    overlapped: int = 0
    wait_s: float = 0.0
    manage_s: float = 0.0


@dataclass(slots=True)
class _Flight:
    """Reads of one routing that are not all there: up to ``stage`` they are complete, ``arrived`` bytes so far."""

    ticket: Ticket
    bank: int
    last: int
    stage: int = -1
    arrived: int = 0


class Stream:
    """Connects the eval hook to store and fetcher. All calls come from the thread that decodes.

    ``weights[bank][projection]`` is the address of a projection's tensor, by which the hook finds its product; without
    weights every routing waits for all of its reads.
    """

    def __init__(self, seam: Seam, store: Store, fetcher: Fetcher) -> None:
        self.seam, self.store, self.fetcher = seam, store, fetcher
        self.counters = StreamCounters()
        self.weights: Sequence[Sequence[int]] = ()
        self._last_stage = [len(bank.projections) - 1 for bank in seam.banks]
        self._flight: _Flight | None = None
        seam.handler = self.route
        seam.advance = self.advance

    def route(self, bank: int, keys: list[ExpertKey]) -> None:
        """One routing with an entry missing: rank, make room, read, mark valid. Raises what the fetcher raises."""
        began, waited = time.perf_counter(), self.counters.wait_s
        self._land()
        self.flush()
        batch = self.store.stage(bank, keys)
        if batch is not None:
            self._take_off(bank, batch)
            self._proceed(0 if self.weights else self._last_stage[bank])
        self.counters.manage_s += time.perf_counter() - began - (self.counters.wait_s - waited)

    def advance(self) -> None:
        """A projection's product was computed: wait for the reads of the next one. Raises what the fetcher raises."""
        began, waited = time.perf_counter(), self.counters.wait_s
        if self._flight is not None:
            self.counters.overlapped += 1
            self._proceed(self._flight.stage + 1)
        self.counters.manage_s += time.perf_counter() - began - (self.counters.wait_s - waited)

    def flush(self) -> None:
        """Tell the store of routings that were all hits, which the hook only logged."""
        touched = self.store.touched
        for keys in self.seam.drain():
            touched(keys)

    def settle(self) -> None:
        """After a decode, failed or not: every touch is accounted and the store is within its budget."""
        began = time.perf_counter()
        with contextlib.suppress(Exception):  # the decode was ended before it used them, which is told elsewhere
            self._land()
        self.flush()
        self.store.settle()
        self.counters.manage_s += time.perf_counter() - began

    def _take_off(self, bank: int, batch: ReadBatch) -> None:
        try:
            self._flight = _Flight(self.fetcher.submit(batch), bank, self._last_stage[bank])
        except BaseException:
            self.store.abandon()
            raise
        self.counters.reads += len(batch)

    def _proceed(self, stage: int) -> None:
        """Wait for the reads up to ``stage``; after the last the entries are valid, else its product is awaited."""
        flight = self._flight
        assert flight is not None
        waiting = time.perf_counter()
        try:
            arrived = self.fetcher.wait(flight.ticket, stage)
            self.counters.wait_s += time.perf_counter() - waiting
            self.counters.read_bytes += arrived - flight.arrived
            flight.stage, flight.arrived = stage, arrived
            if stage == flight.last:
                self.store.commit()
                self._flight = None
            else:
                self.seam.isolate(self.weights[flight.bank][stage])
        except BaseException:
            self._flight = None
            self.seam.isolate(0)
            self.store.abandon()
            raise

    def _land(self) -> None:
        """Wait for what is still out, as a rule nothing."""
        if self._flight is not None:
            self.seam.isolate(0)
            self._proceed(self._flight.last)
