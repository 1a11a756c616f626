"""The in-tree fetchers pass their gate, and the gate fails for what it is there to find."""

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
from bmoe.testing.fetch import FetchGates, Shards, Target
from bmoe_plugins.fetch.pread import PreadFetcher


class TestPread(FetchGates):
    plugin, provider = "bmoe", "pread"


class TestAio(FetchGates):
    plugin, provider = "bmoe", "aio"


class TestUring(FetchGates):
    plugin, provider = "bmoe", "uring"


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("gate", [TestPread, TestAio])
def test_a_batch_that_nobody_waited_for_does_not_spoil_the_next(shards: Shards, gate: type[FetchGates], lanes: int):
    """Ctrl-C may come after submit and before wait."""
    rows = [(index % 2, index, 1, index // 8) for index in range(24)]
    with gate().open(shards, lanes=lanes) as fetcher, gate().faults() as faults:
        given_up = Target(rows, shards.content)
        fetcher.submit(given_up.batch)
        target = Target(rows[::-1], shards.content)
        ticket = fetcher.submit(target.batch)
        assert faults.in_flight <= len(rows)
        fetcher.wait(ticket, 99)
        assert [] == target.wrong(99)


# ---- the gate can fail


def gate(build: Callable[[Facts], Fetcher]) -> FetchGates:
    class Faulty(FetchGates):
        plugin, provider = "bmoe", "pread"

        def load(self) -> Provider[Fetcher]:
            return Provider("faulty", lambda options, facts: build(facts))

    return Faulty()


@pytest.fixture(name="shards")
def shards_(tmp_path: Path) -> Shards:
    return Shards(tmp_path)


class WrongOffset(PreadFetcher):
    def submit(self, reads: ReadBatch, /) -> Any:
        return super().submit(replace(reads, offset=reads.offset - memory.PAGE * (reads.offset > 0)))


class SkipsTheLast(PreadFetcher):
    def _read_one(self, flight: Any) -> bool:
        if flight.next == len(flight.rows) - 1 > 0:
            flight.rows[-1] = (flight.rows[-1][0], 0, 0, *flight.rows[-1][3:])
        return super()._read_one(flight)


class ReadsTooMuch(PreadFetcher):
    def submit(self, reads: ReadBatch, /) -> Any:
        return super().submit(replace(reads, length=reads.length + memory.PAGE))


class DoesNotWait(PreadFetcher):
    def wait(self, ticket: Any, upto: int, /) -> int:
        return super().wait(ticket, upto - 1 if upto < 3 else upto)


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
        self._drain()
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
    from bmoe_plugins.fetch.aio import AioFetcher

    if aio.missing():
        pytest.skip(aio.missing())

    class Hasty(AioFetcher):
        def _drain(self) -> None:
            self._flight = None

    with pytest.raises(AssertionError, match="reads are in flight after the error"):
        gate(Hasty).test_a_failed_read_is_an_error(shards, 1, 1, "EIO")


def test_direct_that_is_not_true_is_found(shards: Shards):
    with pytest.raises(AssertionError, match="the bytes of direct reads are in the page cache"):
        gate(Lies).test_direct_is_true(shards)
    with pytest.raises(AssertionError):
        gate(Lies).test_buffered_if_so_asked(shards)
    with pytest.raises(AssertionError):
        gate(Lies).test_a_file_that_refuses_direct_reads_is_read_buffered(shards)


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
        def wait(self, ticket: Any, upto: int, /) -> int:
            for address, length, _, offset, shard, _ in ticket.rows:
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
