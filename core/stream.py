"""The routing-time sequence: what happens between a layer's router and its expert matmuls, one function per step.

Serial: all reads of a routing are waited for. With overlap they are waited for one projection at a time: those of the
first when it was routed, those of each next one when the product before it was computed; while it is computed the later
ones are still being read. And where so many tokens are routed together that nearly every expert of the next layer will
be needed, its reads begin before it is routed: a projection's when the product with the same projection of this layer
was computed, so that the device never waits for a router. What a prefetcher suggests is the matter of :mod:`bmoe.lane`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bmoe.contracts import BankFacts, BatchContext, ExpertKey, Fetcher, Observer, ReadBatch, Ticket
from bmoe.errors import NativeError
from bmoe.knobs import Knobs
from bmoe.lane import Lane
from bmoe.native.evalhook import Seam
from bmoe.native.router import RouterNodes
from bmoe.pages import by_stage
from bmoe.sight import Sight
from bmoe.store import Store
from bmoe.verified import Verified
from bmoe.watcher import Watcher

WIDE, USED = 0.75, 0.5
"""Read a whole layer ahead if this share of its experts would be used were all equally likely, and that one was of the
layer before: the rest is read for nothing."""


@dataclass(slots=True)
class StreamCounters:
    """Sums since open. ``wait_s`` is spent waiting for reads, ``manage_s`` on everything else inside the callback.

    ``demanded`` counts entries that the model chose, before policies changed them, in routings that Python handled.
    ``overlapped`` counts products that were computed while reads were still out, ``ahead_bytes`` what was read for a
    layer before it was routed; ``read_bytes`` includes them, and nothing that a prefetcher suggested.
    """

    demanded: int = 0
    read_bytes: int = 0
    reads: int = 0
    overlapped: int = 0
    ahead_bytes: int = 0
    wait_s: float = 0.0
    manage_s: float = 0.0


@dataclass(slots=True)
class _Flight:
    """Reads for one bank: ``tickets`` with the bytes of each that have arrived; complete up to ``stage``.

    ``later`` are reads whose turn has not come, one batch per stage; ``guessed`` tickets are counted elsewhere.
    """

    bank: int
    last: int
    tickets: list[Ticket] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    later: list[ReadBatch] = field(default_factory=list)
    guessed: list[Ticket] = field(default_factory=list)
    stage: int = -1

    def add(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        self.arrived.append(0)


class Stream:
    """Connects the eval hook to store and fetcher. All calls come from the thread that decodes.

    ``weights[bank][projection]`` is the address of a projection's tensor, by which the hook finds its product; without
    weights every routing waits for all of its reads. ``lane`` is None without a prefetcher; ``observer`` is a cache
    policy that wants to see routings, each before its entries are ranked.
    """

    def __init__(
        self, seam: Seam, store: Store, fetcher: Fetcher, lane: Lane | None = None, observer: Observer | None = None
    ) -> None:
        self.seam, self.store, self.fetcher, self.lane = seam, store, fetcher, lane
        self._observer = observer
        self.counters = StreamCounters()
        self.weights: Sequence[Sequence[int]] = ()
        self._last_stage = [len(bank.projections) - 1 for bank in seam.banks]
        self._wide_from = [_wide_from(bank) for bank in seam.banks]
        self._wide = False
        self._batch = BatchContext("decode", (0,))
        self._flight: _Flight | None = None
        self._next: _Flight | None = None
        self._routed: tuple[int, list[ExpertKey]] | None = None
        self._watchers: tuple[Watcher, ...] = ()
        self.verified = Verified(seam, store, observer)
        self.knobs: Knobs | None = None
        self._nodes = [RouterNodes(bank.n_expert) for bank in seam.banks]
        self._sight: Sight | None = None
        seam.handler = self.route
        seam.advance = self.advance
        seam.attentive = self._looks

    def watch(self, watcher: Watcher) -> None:
        """Show everything from now on to ``watcher`` too; not while a decode runs."""
        self._watchers = (*self._watchers, watcher)
        self.seam.attentive = True

    def obey(self, knobs: Knobs) -> None:
        """Let routing policies change every routing from now on; not while a decode runs."""
        self.knobs = knobs
        self.seam.attentive = True

    def sight(self, bank: int) -> Sight:
        """What can be seen of the routing that is being handled."""
        if self._sight is None:
            self._sight = Sight(self.seam.banks[bank], self._nodes[bank], self.seam.node, self._batch)
        return self._sight

    def begin(self, batch: BatchContext) -> None:
        """Before a decode of these tokens."""
        self._batch, self._sight = batch, None
        verifies = batch.phase == "verify"
        self.verified.begin(batch)
        # of a few drafted tokens most experts of a layer would be read for nothing
        self._wide = not verifies and bool(self.weights) and any(len(batch.positions) >= w for w in self._wide_from)
        if self.lane is not None:
            self.lane.begin(batch)
            if self._wide:
                self.lane.clear()  # layers are read whole
        if self.knobs is not None:
            self.knobs.begin(batch)
        self.seam.attentive = self._wide or self._looks or self._turns or bool(self._watchers) or verifies
        for watcher in self._watchers:
            watcher.begin(batch)

    @property
    def _looks(self) -> bool:
        """Whether a plugin is to see every routing, hit or not."""
        return self._observer is not None or (self.lane is not None and self.lane.listens)

    @property
    def _turns(self) -> bool:
        """Whether a routing policy acts on this decode."""
        return self.knobs is not None and self.knobs.acts

    def close(self) -> None:
        """Nothing is read any more."""
        if self.lane is not None:
            self.lane.clear()

    def route(self, bank: int, keys: list[ExpertKey]) -> None:
        """One routing with an entry missing, or any while someone attends: change it, show it, load it.

        Raises what a plugin or the fetcher raises.
        """
        try:
            self.counters.demanded += len(keys)
            if self.knobs is not None and self.knobs.acts:
                began = time.perf_counter()
                keys = self.knobs.turn(bank, self.sight(bank), keys)
                self.counters.manage_s += time.perf_counter() - began
            for watcher in self._watchers:
                watcher.routing(bank, keys)
            self._load(bank, keys)
            for watcher in self._watchers:
                watcher.handled(bank)
        finally:
            self._sight = None

    def _load(self, bank: int, keys: list[ExpertKey]) -> None:
        """Rank, make room, read, mark valid."""
        began, waited = time.perf_counter(), self.counters.wait_s
        try:
            self._expect_all_read()
            self._flight = None
            self.seam.isolate(0)
            self.flush()
            self._retire()
            # before anything is staged: giving up would forget that too
            if self._next is not None and self._next.bank != bank:
                self._give_up()
            if self.lane is not None:
                self.lane.yield_to(bank, keys)
            self.verified.show(lambda: self.sight(bank))
            batch = self.store.stage(bank, keys)
            self.verified.hold(bank, lambda: self.sight(bank))
            self._flight = flight = self._arriving(bank)
            if batch is not None:
                flight.add(self.fetcher.submit(batch))
                self.counters.reads += len(batch)
            if self._wide:
                self._routed = (bank, keys)
                if len(keys) >= USED * self.seam.banks[bank].n_expert:
                    self._look_ahead(bank + 1)
            if self.lane is not None:
                flight.guessed = self.lane.claim(keys)
                for ticket in flight.guessed:
                    self.fetcher.wait(ticket, -1)  # whatever is awaited is no read-ahead any more
                if self.lane.listens:
                    self.lane.attend(bank, self.sight(bank), asked=not self._wide)
            if flight.tickets or flight.guessed or self._next is not None:
                self._proceed(0 if self.weights else flight.last)
            else:
                self._flight = None
        except BaseException:
            self._give_up()
            raise
        self.counters.manage_s += time.perf_counter() - began - (self.counters.wait_s - waited)

    def advance(self) -> None:
        """A projection's product was computed: wait for the reads of the next one. Raises what the fetcher raises."""
        began, waited = time.perf_counter(), self.counters.wait_s
        flight = self._flight
        if flight is not None:
            self.counters.overlapped += 1
            try:
                self._follow(flight.stage, flight.last)
                if flight.stage < flight.last:
                    self._proceed(flight.stage + 1)
                else:
                    self._flight = None
                    if self._next is not None and self._next.tickets:
                        self.fetcher.wait(self._next.tickets[-1], -1)  # hand over: nobody waits before the next router
            except BaseException:
                self._give_up()
                raise
        self.counters.manage_s += time.perf_counter() - began - (self.counters.wait_s - waited)

    def flush(self) -> None:
        """Tell the store of routings that were all hits, which the hook only logged."""
        touched = self.store.touched
        for keys in self.seam.drain():
            touched(keys)

    def ended(self, complete: bool, took_s: float) -> None:
        """Tell those that watch that a decode is over, how long it took, and whether what it computed is kept."""
        if complete and self.lane is not None:
            self.lane.ended(self._batch, took_s)
        for watcher in self._watchers:
            watcher.end(complete)

    def accepted(self, kept: Sequence[int]) -> int:
        """Of the verify batch that was decoded last, the tokens at these places are a part of the text.

        The cache hears of what they used, in their order. Returns the bytes that were read for other tokens alone.
        """
        for watcher in self._watchers:
            watcher.accepted(kept)
        return self.verified.accepted(kept)

    def settle(self) -> None:
        """After a decode, failed or not: every touch is accounted and the store is within its budget."""
        began = time.perf_counter()
        if self.seam.stopped or self._next is not None:  # nobody will use what is still out
            self._give_up()
        try:
            self._expect_all_read()
            if self.knobs is not None and not self.seam.stopped:
                self.knobs.expect_weighed()
        finally:
            self._flight = None
            self.seam.isolate(0)
            self.flush()
            self._retire()
            self.store.settle()
            self.counters.manage_s += time.perf_counter() - began

    def _arriving(self, bank: int) -> _Flight:
        """The reads that began before this bank was routed, or none."""
        flight, self._next = self._next, None
        if flight is None:
            return _Flight(bank, self._last_stage[bank])
        self._start(flight, flight.last)
        return flight

    def _look_ahead(self, bank: int) -> None:
        """Plan the reads of the next bank, if all but a few of its experts will be used and there is room.

        Not of the last layer: llama.cpp computes it for the tokens alone whose logits were asked for, as a rule one.
        With a head for next-token prediction that is the head's; the trunk's last one is computed for all tokens then.
        """
        banks = self.seam.banks
        if bank < len(banks) and banks[bank].layer < banks[-1].layer and self._many(bank):
            batch = self.store.ahead(bank)
            if batch is not None:
                self._next = _Flight(bank, self._last_stage[bank], later=by_stage(batch))

    def _many(self, bank: int) -> bool:
        return len(self._batch.positions) >= self._wide_from[bank]

    def _follow(self, stage: int, last: int) -> None:
        """The product of ``stage`` was computed: what follows into its place may be read."""
        if self._next is not None:
            self._start(self._next, self._next.last if stage == last else stage)

    def _start(self, flight: _Flight, upto: int) -> None:
        while flight.later and int(flight.later[0].stage[0]) <= upto:
            batch = flight.later.pop(0)
            flight.add(self.fetcher.submit(batch))
            self.counters.reads += len(batch)
            self.counters.ahead_bytes += int(batch.length.sum())

    def _proceed(self, stage: int) -> None:
        """Wait for the reads up to ``stage``; after the last the entries are valid, else its product is awaited."""
        flight = self._flight
        assert flight is not None
        waiting = time.perf_counter()
        for index, ticket in enumerate(flight.tickets):
            self._arrived(flight, index, self.fetcher.wait(ticket, stage))
        for ticket in flight.guessed:
            self.fetcher.wait(ticket, stage)
        if stage < flight.last and self._next is None and self._all_there(flight):
            stage = flight.last  # a few reads often arrive together: then no product needs to be isolated
        self.counters.wait_s += time.perf_counter() - waiting
        flight.stage = stage
        if stage == flight.last:
            self.store.commit(flight.bank)
        if stage < flight.last or self._next is not None:
            self.seam.isolate(self.weights[flight.bank][stage])
        else:
            self._flight = None

    def _all_there(self, flight: _Flight) -> bool:
        for index, ticket in enumerate(flight.tickets):
            if not self.fetcher.ready(ticket, flight.last):
                return False
            self._arrived(flight, index, self.fetcher.wait(ticket, flight.last))
        for ticket in flight.guessed:
            if not self.fetcher.ready(ticket, flight.last):
                return False
            self.fetcher.wait(ticket, flight.last)
        return True

    def _arrived(self, flight: _Flight, index: int, nbytes: int) -> None:
        self.counters.read_bytes += nbytes - flight.arrived[index]
        flight.arrived[index] = nbytes

    def _retire(self) -> None:
        """The last routing of many tokens was computed."""
        if self._routed is not None:
            (bank, keys), self._routed = self._routed, None
            self.store.retire(bank, keys)

    def _give_up(self) -> None:
        """Nothing that is out will be used: no read may change memory any more, and no entry is valid."""
        flights = (self._flight, self._next)
        self._flight = self._next = self._routed = None
        self.seam.isolate(0)
        with contextlib.ExitStack() as all_of_it:  # an interrupt in one step keeps no other from being done
            all_of_it.callback(self.store.abandon)
            for flight in flights:
                for ticket in (*flight.tickets, *flight.guessed) if flight is not None else ():
                    all_of_it.callback(self.fetcher.cancel, ticket)
            if self.lane is not None:
                all_of_it.callback(self.lane.clear)

    def _expect_all_read(self) -> None:
        """Raise NativeError if a product was computed that should have been awaited: its bytes were not there."""
        flight = self._flight
        if flight is not None and flight.stage < flight.last:
            self._give_up()
            layer = self.seam.banks[flight.bank].layer
            raise NativeError(
                f'layer {layer} was computed before it was read; set stream.overlap = "off" and report it'
            )


def _wide_from(bank: BankFacts) -> float:
    """How many tokens are routed to ``WIDE`` of a bank's experts, if all are equally likely."""
    share = bank.n_used / bank.n_expert
    return 1 if share >= WIDE else math.log(1 - WIDE) / math.log(1 - share)
