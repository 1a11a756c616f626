"""The part of the fetchers' gate that is about several batches at once: their order, their errors, their end."""

from __future__ import annotations

import contextlib
import errno
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.contracts import Fetcher, Ticket
from bmoe.errors import ReadError
from bmoe.testing.faults import Faults
from bmoe.testing.target import PAGE, Shards, Target

_Rows = list[tuple[int, int, int, int]]


class TicketGates(ABC):
    """Base of :class:`~bmoe.testing.fetch.FetchGates`, which says what its attributes mean."""

    examples: ClassVar[int] = 40
    depth: ClassVar[int] = 8
    ahead: ClassVar[int] = 12
    hands_over: ClassVar[bool] = True
    patience_s: ClassVar[float] = 20

    @abstractmethod
    def open(
        self, shards: Shards, *, lanes: int = 2, direct: bool = True, batch: int = 96
    ) -> AbstractContextManager[Fetcher]:
        """A fetcher over these files."""

    @abstractmethod
    def faults(self) -> AbstractContextManager[Faults]:
        """What counts reads."""

    def test_tickets_are_waited_for_each_on_its_own(self, shards: Shards) -> None:
        """Ten batches out at once, demanded and ahead, waited for in another order than they were submitted in."""
        with self.open(shards) as fetcher, _targets(shards, 10) as targets:
            tickets = [fetcher.submit(t.batch, ahead=index % 3 == 2) for index, t in enumerate(targets)]
            for index in (9, 0, 5, 2, 8, 1, 7, 3, 6, 4):
                target, ticket = targets[index], tickets[index]
                for stage in range(3):
                    assert fetcher.wait(ticket, stage) >= target.required(stage)
                    assert target.wrong(stage) == [], f"after wait(upto={stage}) bytes of its stages are not the file's"
                    assert fetcher.ready(ticket, stage), "what was waited for is not ready"
                assert not target.touched_between()

    def test_few_reads_are_in_flight_while_it_waits(self, shards: Shards) -> None:
        """Lower stages come early because no more than ``depth`` reads are out, in their order."""
        rows = [(index % 2, index % 30, 1, 0) for index in range(96)]
        with self.open(shards) as fetcher, self.faults() as faults, _target(shards, rows) as target:
            fetcher.wait(fetcher.submit(target.batch), 0)
            assert 0 < faults.most <= self.depth, f"{faults.most} reads were in flight together"
        rows = [(index % 2, index % 30, 1, index // 24) for index in range(96)]
        with self.open(shards, lanes=1) as fetcher, self.faults() as faults, _target(shards, rows) as target:
            fetcher.wait(fetcher.submit(target.batch), 99)
            stages = {row.address: row.stage for row in target.rows}
            order = [stages[place[1]] for place in faults.begun if place[1] in stages]
            assert order == sorted(order), "a higher stage was begun before a lower one"

    @pytest.mark.parametrize("upto", [-1, 0])
    def test_what_is_left_is_handed_over_when_the_wait_ends(self, shards: Shards, upto: int) -> None:
        """Nobody is there to start reads while the model computes."""
        if not self.hands_over:
            pytest.skip("the reads that it has handed over cannot be counted")
        rows = [(index % 2, index % 30, 1, index // 24) for index in range(96)]
        with self.open(shards) as fetcher, self.faults() as faults, _target(shards, rows) as target:
            other = fetcher.submit(target.batch)
            assert len(faults.begun) <= self.depth
            fetcher.wait(other, upto)
            assert {row.address for row in target.rows} <= {place[1] for place in faults.begun}
            fetcher.wait(other, 99)
            assert target.wrong(99) == []

    def test_demand_never_queues_behind_much_read_ahead(self, shards: Shards) -> None:
        """However much is to be read ahead, few of it is begun before the last demanded read is; later all of it is."""
        rows = [(index % 2, index % 30, 1, index // 8) for index in range(24)]
        with self.open(shards) as fetcher, self.faults() as faults, _targets(shards, 4, rows) as early:
            tickets = [fetcher.submit(target.batch, ahead=True) for target in early]
            assert faults.in_flight <= self.ahead, f"{faults.in_flight} reads ahead are in flight"
            for _ in range(5):
                with _target(shards, rows) as target:
                    before = len(faults.begun)
                    demanded = fetcher.submit(target.batch)
                    fetcher.wait(demanded, 0)
                    fetcher.wait(demanded, 99)
                    mine = [self._is_of(target, place[1]) for place in faults.begun[before:]]
                    assert sum(mine) >= len(rows)
                    last = len(mine) - mine[::-1].index(True)
                    first_ahead = mine[:last].count(False)
                    assert first_ahead <= self.ahead, f"{first_ahead} reads ahead were begun before demanded ones"
                    assert target.wrong(99) == []
            for target, ticket in zip(early[:2], tickets, strict=False):
                self._pump(fetcher, ticket)
                assert target.wrong(99) == [], "a ticket is ready whose bytes are not in place"
            fetcher.wait(tickets[3], 99)  # now it is demanded
            assert early[3].wrong(99) == []

    def test_what_is_cancelled_is_not_read(self, shards: Shards) -> None:
        """Little of it was begun, nothing of it is in flight, and the others arrive."""
        rows = [(index % 2, index % 30, 1, index // 32) for index in range(96)]
        with self.open(shards) as fetcher, self.faults() as faults, _targets(shards, 3, rows) as targets:
            kept = fetcher.submit(targets[0].batch)
            fetcher.wait(kept, 99)
            ahead, demanded = fetcher.submit(targets[1].batch, ahead=True), fetcher.submit(targets[2].batch)
            for ticket, target in ((ahead, targets[1]), (demanded, targets[2]), (kept, targets[0])):
                fetcher.cancel(ticket)
                fetcher.cancel(ticket)
                assert faults.within(target.region) == 0, "reads of a cancelled ticket are in flight"
            for _ in range(2):  # what is not cancelled would be read before this
                fetcher.wait(fetcher.submit(targets[0].batch), 99)
            for target, most in ((targets[1], self.ahead), (targets[2], self.depth)):
                begun = sum(self._is_of(target, place[1]) for place in faults.begun)
                assert begun <= most, f"{begun} reads of a cancelled ticket were begun"
            assert targets[0].wrong(99) == []
            again = fetcher.submit(targets[1].batch)
            fetcher.wait(again, 99)
            assert targets[1].wrong(99) == []

    @pytest.mark.parametrize("nth", [1, 7, 30])
    def test_an_error_is_told_by_the_wait_for_its_own_ticket(self, shards: Shards, nth: int) -> None:
        """One failed read among three batches: exactly one wait raises, then nothing of its batch is in flight."""
        with self.open(shards) as fetcher, self.faults() as faults, _targets(shards, 3) as targets:
            with faults.once(nth, -errno.EIO):
                tickets = [fetcher.submit(target.batch, ahead=index == 1) for index, target in enumerate(targets)]
                failed = []
                for index in (2, 0, 1):
                    try:
                        fetcher.wait(tickets[index], 99)
                    except ReadError:
                        failed.append(index)
                        assert faults.within(targets[index].region) == 0, "reads of a failed ticket are in flight"
                    else:
                        assert targets[index].wrong(99) == []
            assert faults.met, "the fault was never met: override faults()"
            assert len(failed) == 1, f"the waits of {len(failed)} tickets raised"
            assert fetcher.ready(tickets[failed[0]], 99), "a wait that raises at once is not announced"
            fetcher.cancel(tickets[failed[0]])

    def test_cancelling_does_not_raise_for_a_failed_read(self, shards: Shards) -> None:
        """Nobody wants to know."""
        with self.open(shards) as fetcher, self.faults() as faults, _targets(shards, 2) as targets:
            with faults.always(-errno.EIO):
                tickets = [fetcher.submit(target.batch) for target in targets]
                for ticket in tickets:
                    fetcher.cancel(ticket)
            assert faults.in_flight == 0

    @pytest.mark.parametrize("nth", [1, 9])
    def test_a_read_that_is_cut_short_goes_on(self, shards: Shards, nth: int) -> None:
        """A signal or a limit of the device may end a read early; the file has the rest."""
        rows = [(index % 2, index, 3, index // 4) for index in range(12)]
        for count in (PAGE, 100):
            with self.open(shards) as fetcher, self.faults() as faults, _target(shards, rows) as target:
                with faults.cut(nth, count):
                    fetcher.wait(fetcher.submit(target.batch), 99)
                assert faults.met, "the fault was never met: override faults()"
                assert target.wrong(99) == []

    @pytest.mark.parametrize("nth", [1, 7])
    def test_an_interrupt_ends_no_other_ticket(self, shards: Shards, nth: int) -> None:
        """Whoever waited is interrupted; what else was out arrives when it is waited for."""
        with self.open(shards) as fetcher, self.faults() as faults, _targets(shards, 3) as targets:
            others = [fetcher.submit(targets[0].batch), fetcher.submit(targets[1].batch, ahead=True)]
            ticket = fetcher.submit(targets[2].batch)
            with faults.interrupt(nth), pytest.raises(KeyboardInterrupt):
                fetcher.wait(ticket, 99)
            assert faults.within(targets[2].region) == 0, "reads of an interrupted ticket are in flight"
            for target, other in zip(targets, others, strict=False):
                assert target.required(99) <= fetcher.wait(other, 99) <= other.nbytes
                assert target.wrong(99) == []

    def test_close_ends_all_tickets(self, shards: Shards) -> None:
        """Demanded, ahead, waited for in part: nothing is in flight afterwards."""
        with self.faults() as faults, _targets(shards, 4) as targets, self.open(shards) as fetcher:
            tickets = [fetcher.submit(target.batch, ahead=index == 1) for index, target in enumerate(targets)]
            fetcher.wait(tickets[2], 0)
            fetcher.close()
            assert faults.in_flight == 0, f"{faults.in_flight} reads are in flight after close"

    def test_any_order_of_calls(self, shards: Shards) -> None:
        """Submit, wait, ready and cancel in any order: what a wait or a ready promises is there, and nothing leaks."""
        rows = st.lists(
            st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 6), st.integers(0, 2)),
            min_size=1,
            max_size=30,
        )
        step = st.one_of(
            st.tuples(st.just("submit"), rows, st.booleans()),
            st.tuples(st.sampled_from(["wait", "ready", "cancel"]), st.integers(0, 20), st.integers(-1, 3)),
        )
        done: set[str] = set()

        @settings(
            max_examples=self.examples, derandomize=True, database=None, deadline=None, report_multiple_bugs=False
        )
        @given(st.lists(step, min_size=1, max_size=24))
        def check(steps: list[tuple[str, object, object]]) -> None:
            out: list[tuple[Ticket, Target]] = []
            for what, first, second in steps:
                if what == "submit":
                    if len(out) < 8:
                        target = Target(first, shards.content)  # type: ignore[arg-type]
                        out.append((fetcher.submit(target.batch, ahead=bool(second)), target))
                    continue
                if not out:
                    continue
                ticket, target = out[int(first) % len(out)]  # type: ignore[call-overload]
                upto = int(second)  # type: ignore[call-overload]
                done.add(what)
                if what == "cancel":
                    fetcher.cancel(ticket)
                    assert faults.within(target.region) == 0, "reads of a cancelled ticket are in flight"
                    target.region.close()
                    out.remove((ticket, target))
                elif what == "wait" or fetcher.ready(ticket, upto):
                    if what == "ready":
                        assert target.wrong(upto) == [], f"ready up to {upto}, and bytes are not the file's"
                    arrived = fetcher.wait(ticket, upto)
                    assert target.required(upto) <= arrived <= ticket.nbytes
                    assert target.wrong(upto) == [], f"bytes of stages up to {upto} are not the file's"
            for ticket, target in out:
                fetcher.wait(ticket, 99)
                assert target.wrong(99) == []
                assert not target.touched_between(), "memory beside the reads was written"
                target.region.close()
            assert faults.in_flight == 0, "reads are in flight that nobody knows of"

        with self.open(shards) as fetcher, self.faults() as faults:
            check()
        assert done == {"wait", "ready", "cancel"}

    @staticmethod
    def _is_of(target: Target, address: int) -> bool:
        return target.region.address <= address < target.region.address + target.region.nbytes

    def _pump(self, fetcher: Fetcher, ticket: Ticket) -> None:
        until = time.monotonic() + self.patience_s
        while not fetcher.ready(ticket, 99):
            assert time.monotonic() < until, "a ticket never gets ready, however often it is asked"


@contextlib.contextmanager
def _target(shards: Shards, rows: _Rows) -> Iterator[Target]:
    target = Target(rows, shards.content)
    yield target
    target.region.close()


@contextlib.contextmanager
def _targets(shards: Shards, count: int, rows: _Rows | None = None) -> Iterator[list[Target]]:
    rows = rows or [(index % 2, index, 2, index // 4) for index in range(12)]
    targets = [Target(rows, shards.content) for _ in range(count)]
    yield targets
    for target in targets:
        target.region.close()
