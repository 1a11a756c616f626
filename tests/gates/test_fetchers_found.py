"""The gate of fetchers fails for what it is there to find."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bmoe.contracts import Facts, Fetcher, Provider, ReadBatch
from bmoe.errors import ReadError
from bmoe.native import aio, memory
from bmoe.testing.fetch import FetchGates
from bmoe.testing.target import Shards, Target
from bmoe_plugins.fetch._queue import QueueOptions, ReadQueue, open_files
from bmoe_plugins.fetch.aio import AioDevice
from bmoe_plugins.fetch.pread import PreadFetcher


@pytest.fixture(name="shards")
def shards_(tmp_path: Path) -> Shards:
    return Shards(tmp_path)


def gate(build: Callable[[Facts], Fetcher]) -> FetchGates:
    class Faulty(FetchGates):
        plugin, provider = "bmoe", "pread"

        def load(self) -> Provider[Fetcher]:
            return Provider("faulty", lambda options, facts: build(facts))

    return Faulty()


def impatient(build: Callable[[Facts], Fetcher]) -> FetchGates:
    made = gate(build)
    made.patience_s = 0.2  # type: ignore[misc]
    return made


class WrongOffset(PreadFetcher):
    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Any:
        return super().submit(replace(reads, offset=reads.offset - memory.PAGE * (reads.offset > 0)))


class SkipsTheLast(PreadFetcher):
    def _split(self, reads: ReadBatch, ahead: bool) -> Any:
        if len(reads) > 1:
            length, required = reads.length.copy(), reads.required.copy()
            length[-1] = required[-1] = 0
            reads = replace(reads, length=length, required=required)
        return super()._split(reads, ahead)


class ReadsTooMuch(PreadFetcher):
    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Any:
        return super().submit(replace(reads, length=reads.length + memory.PAGE))


class DoesNotWait(PreadFetcher):
    def wait(self, ticket: Any, upto: int, /) -> int:
        return ticket.nbytes if upto < 3 else super().wait(ticket, upto)


class IgnoresErrors(PreadFetcher):
    def wait(self, ticket: Any, upto: int, /) -> int:
        try:
            return super().wait(ticket, upto)
        except ReadError:
            return ticket.nbytes


class IgnoresInterrupts(PreadFetcher):
    def wait(self, ticket: Any, upto: int, /) -> int:
        try:
            return super().wait(ticket, upto)
        except KeyboardInterrupt:
            return 0


class SaysLittle(PreadFetcher):
    def wait(self, ticket: Any, upto: int, /) -> int:
        try:
            return super().wait(ticket, upto)
        except ReadError as error:
            raise ReadError(str(error).partition(" at offset")[0]) from error


class Lies(PreadFetcher):
    def __init__(self, facts: Facts) -> None:
        super().__init__(replace(facts, fetch=replace(facts.fetch, direct=False)))
        self.direct = True


class SaysNotWhy(PreadFetcher):
    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.note = ""


class DiesOfAnError(PreadFetcher):
    def submit(self, reads: ReadBatch, /) -> Any:
        if getattr(self, "broken", False):
            raise ReadError("no more")
        return super().submit(reads)

    def wait(self, ticket: Any, upto: int, /) -> int:
        try:
            return super().wait(ticket, upto)
        except ReadError:
            self.broken = True
            raise


class Leaks(PreadFetcher):
    def close(self) -> None:
        self._files = []
        super().close()


class LeavesThreads(PreadFetcher):
    def close(self) -> None:
        for file in self._files:
            file.close()


class ClosesOnce(PreadFetcher):
    def close(self) -> None:
        for file in self._files:
            if file.fd < 0:
                os.close(file.fd)
        super().close()


@pytest.mark.parametrize("faulty", [WrongOffset, SkipsTheLast, DoesNotWait])
def test_bytes_that_are_not_in_place_are_found(shards: Shards, faulty: type[PreadFetcher]):
    with pytest.raises(AssertionError, match="bytes of its stages are not the file's"):
        gate(faulty).test_bytes_are_the_files(shards, 1, False)
    with pytest.raises(AssertionError, match="bytes of its stages are not the file's"):
        gate(faulty).test_the_largest_batch(shards, 1)


def test_bytes_beside_their_place_are_found(shards: Shards):
    with pytest.raises(AssertionError):
        gate(ReadsTooMuch).test_every_offset_and_length(shards, False)


@pytest.mark.parametrize("fault", ["EIO", "EINVAL", "short"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_an_error_that_is_not_reported_is_found(shards: Shards, lanes: int, fault: str):
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        gate(IgnoresErrors).test_a_failed_read_is_an_error(shards, lanes, 5, fault)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        gate(IgnoresErrors).test_a_file_that_was_truncated_is_an_error(shards, True)


def test_an_interrupt_that_is_swallowed_is_found(shards: Shards):
    with pytest.raises(AssertionError, match="the interrupt was swallowed"):
        gate(IgnoresInterrupts).test_an_interrupt_ends_its_batch(shards, 1)


def test_an_error_without_its_place_is_found(shards: Shards):
    with pytest.raises(AssertionError, match="does not name file, offset and length"):
        gate(SaysLittle).test_a_failed_read_is_an_error(shards, 1, 5, "EIO")
    with pytest.raises(AssertionError, match="does not name file, offset and length"):
        gate(SaysLittle).test_a_file_that_was_truncated_is_an_error(shards, True)


def test_a_fetcher_that_does_not_survive_an_error_is_found(shards: Shards):
    with pytest.raises(ReadError, match="no more"):
        gate(DiesOfAnError).test_a_failed_read_is_an_error(shards, 1, 5, "EIO")


def test_reads_in_flight_after_an_error_are_found(shards: Shards):
    """An AIO fetcher that does not collect what is out."""
    if aio.missing():
        pytest.skip(aio.missing())

    class Hasty(ReadQueue):
        def __init__(self, facts: Facts) -> None:
            super().__init__(open_files(facts), lambda: AioDevice(128), QueueOptions())

        def _abandon(self, flight: Any) -> None:
            flight.size = flight.next
            self._leave(flight)

    with pytest.raises(AssertionError, match="reads are in flight after the error"):
        gate(Hasty).test_a_failed_read_is_an_error(shards, 1, 1, "EIO")


class KnowsNoRank(PreadFetcher):
    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Any:
        return super().submit(reads)


class AheadOfAll(PreadFetcher):
    def _start_ahead(self) -> None:
        for flight in self._flights.values():
            self._launch(flight, flight.size)


class NeverAhead(PreadFetcher):
    def _start_ahead(self) -> None:
        pass


@pytest.mark.parametrize("faulty", [KnowsNoRank, AheadOfAll, NeverAhead])
def test_read_ahead_that_delays_demand_or_never_comes_is_found(shards: Shards, faulty: type[PreadFetcher]):
    with pytest.raises(AssertionError, match="ahead|never gets ready"):
        impatient(faulty).test_demand_never_queues_behind_much_read_ahead(shards)


class Floods(PreadFetcher):
    def _start(self, flight: Any, limit: int) -> None:
        super()._start(flight, 96)

    def __init__(self, facts: Facts) -> None:
        super().__init__(replace(facts, fetch=replace(facts.fetch, lanes=32)))


class HigherStagesFirst(PreadFetcher):
    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Any:
        back = {name: getattr(reads, name)[::-1] for name in ("address", "length", "required", "offset", "shard")}
        return super().submit(replace(reads, **back), ahead=ahead)


def test_more_in_flight_than_is_bearable_is_found(shards: Shards):
    with pytest.raises(AssertionError, match="reads were in flight together"):
        gate(Floods).test_few_reads_are_in_flight_while_it_waits(shards)


def test_stages_in_another_order_are_found(shards: Shards):
    with pytest.raises(AssertionError, match="a higher stage was begun before a lower one"):
        gate(HigherStagesFirst).test_few_reads_are_in_flight_while_it_waits(shards)


def test_what_is_kept_back_after_a_wait_is_found(shards: Shards):
    class KeepsBack(ReadQueue):
        def __init__(self, facts: Facts) -> None:
            super().__init__(open_files(facts), lambda: AioDevice(128), QueueOptions())

        def _hand_over(self) -> None:
            pass

    if aio.missing():
        pytest.skip(aio.missing())
    with pytest.raises(AssertionError):
        gate(KeepsBack).test_what_is_left_is_handed_over_when_the_wait_ends(shards, 0)


class CancelsNothing(PreadFetcher):
    def cancel(self, ticket: Any, /) -> None:
        pass


class CancelsLate(PreadFetcher):
    def cancel(self, ticket: Any, /) -> None:
        self.wait(ticket, 99)


@pytest.mark.parametrize("faulty", [CancelsNothing, CancelsLate])
def test_a_cancel_that_reads_on_is_found(shards: Shards, faulty: type[PreadFetcher]):
    with pytest.raises(AssertionError, match="of a cancelled ticket"):
        gate(faulty).test_what_is_cancelled_is_not_read(shards)


def test_a_cancel_that_raises_is_found(shards: Shards):
    with pytest.raises(ReadError):
        gate(CancelsLate).test_cancelling_does_not_raise_for_a_failed_read(shards)


class BlamesOthers(PreadFetcher):
    def wait(self, ticket: Any, upto: int, /) -> int:
        self.flights = [*getattr(self, "flights", []), ticket.flight]
        arrived = super().wait(ticket, upto)
        for flight in [*self._flights.values(), *self.flights]:
            self._result(flight)
        return arrived


def test_an_error_of_another_ticket_is_found(shards: Shards):
    with pytest.raises(AssertionError, match="tickets raised"):
        gate(BlamesOthers).test_an_error_is_told_by_the_wait_for_its_own_ticket(shards, 1)


class AlwaysReady(PreadFetcher):
    def ready(self, ticket: Any, upto: int, /) -> bool:
        return True


def test_ready_that_is_not_true_is_found(shards: Shards):
    with pytest.raises(AssertionError, match="is ready whose bytes are not in place"):
        gate(AlwaysReady).test_demand_never_queues_behind_much_read_ahead(shards)


class TakesShortForFailed(PreadFetcher):
    def _finish(self, flight: Any, index: int, result: int) -> int:
        return result


def test_a_short_read_that_is_given_up_is_found(shards: Shards):
    with pytest.raises(ReadError):
        gate(TakesShortForFailed).test_a_read_that_is_cut_short_goes_on(shards, 1)


class DropsAll(PreadFetcher):
    def mend(self, dropped: Any) -> None:
        super().mend(dropped)
        for flight in self._flights.values():
            flight.pending = [0, 0, 0]
        self._flights.clear()


def test_an_interrupt_that_ends_other_tickets_is_found(shards: Shards):
    with pytest.raises(AssertionError):
        gate(DropsAll).test_an_interrupt_ends_no_other_ticket(shards, 1)


def test_direct_that_is_not_true_is_found(shards: Shards):
    with pytest.raises(AssertionError, match="bytes of direct reads are in the page cache"):
        gate(Lies).test_direct_is_true(shards)
    with pytest.raises(AssertionError):
        gate(Lies).test_buffered_if_so_asked(shards)
    with pytest.raises(AssertionError):
        gate(Lies).test_a_file_that_refuses_direct_reads_is_read_buffered(shards)


class KeepsPages(PreadFetcher):
    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._used = None


def test_pages_that_are_kept_are_found(shards: Shards):
    with pytest.raises(AssertionError, match="still in the page cache"):
        gate(KeepsPages).test_buffered_reads_leave_nothing_in_the_page_cache(shards)


def test_a_fall_back_that_is_not_explained_is_found(shards: Shards):
    with pytest.raises(AssertionError):
        gate(SaysNotWhy).test_a_file_that_refuses_direct_reads_is_read_buffered(shards)


@pytest.mark.parametrize("faulty", [Leaks, LeavesThreads])
def test_what_close_leaves_behind_is_found(shards: Shards, faulty: type[PreadFetcher]):
    made: list[PreadFetcher] = []

    def build(facts: Facts) -> Fetcher:
        fetcher = faulty(facts)
        made.append(fetcher)
        fetcher.kept = list(fetcher._files)
        return fetcher

    with pytest.raises(AssertionError):
        gate(build).test_close_gives_everything_back(shards, 2)
    for fetcher in made:
        for file in fetcher.kept:
            file.close()
        fetcher._files = []
        PreadFetcher.close(fetcher)


def test_a_second_close_that_fails_is_found(shards: Shards):
    with pytest.raises(OSError, match="Bad file descriptor"):
        gate(ClosesOnce).test_close_gives_everything_back(shards, 1)


def test_a_fetcher_that_the_faults_do_not_reach_is_told_to_bring_its_own(shards: Shards):
    class Elsewhere(PreadFetcher):
        def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Any:
            return reads

        def wait(self, ticket: Any, upto: int, /) -> int:
            for address, length, _, offset, shard, _ in map(ticket.row, range(len(ticket))):
                data = os.pread(self._files[shard].fd, length, offset)
                memory.view(address, len(data))[:] = data
            raise ReadError(f"{self._files[0].path}: something about 0 and 4096")

    def build(facts: Facts) -> Fetcher:
        return Elsewhere(replace(facts, fetch=replace(facts.fetch, direct=False, lanes=1)))

    with pytest.raises(AssertionError, match=r"override faults\(\)"):
        gate(build).test_a_failed_read_is_an_error(shards, 1, 1, "EIO")


def test_a_target_knows_its_own_bytes(shards: Shards):
    """The checks themselves: an unread place is wrong, a read one is right, and a page beside it is seen."""
    target = Target([(1, 36, 2, 0)], shards.content)
    row = target.rows[0]
    assert [row] == target.wrong(0)
    memory.view(row.address, row.required)[:] = shards.content[1][row.offset :]
    assert [] == target.wrong(0)
    assert not target.touched_between()
    memory.fill(row.address + row.length, 0, 1)
    assert target.touched_between()
