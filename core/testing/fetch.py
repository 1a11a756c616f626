"""The gate of fetchers: subclass :class:`FetchGates`, name the plugin, and pytest proves that bytes or errors come."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.contracts import Facts, Fetcher, FetchFacts, Provider, Read
from bmoe.errors import ReadError
from bmoe.native import residency
from bmoe.testing.caches import cache_facts
from bmoe.testing.faults import Faults
from bmoe.testing.load import load_provider
from bmoe.testing.target import PAGE, SIZES, Shards, Target
from bmoe.testing.tickets import TicketGates

BATCH = 96
LANES = (1, 2, 8)
LEAVE_S = 10.0
"""How long a page may take to leave the page cache: one that is being read or written cannot."""
FAULTS = {"EIO": -errno.EIO, "EINVAL": -errno.EINVAL, "short": 100}


@pytest.mark.gate
class FetchGates(TicketGates):
    """Proves that a fetcher keeps its contract. A subclass sets class attributes and nothing else.

    ``plugin`` is the entry point of group ``bmoe.plugins`` (``"bmoe"`` for in-tree ones) that provides ``provider``.
    ``examples`` is how many random batches each property gets. Faults are put below the plugin, into
    :mod:`bmoe.native`; a fetcher that reads by other means overrides ``faults``. ``depth`` and ``ahead`` are the bounds
    that it keeps to with ``options``: reads in flight while it waits, and read-ahead in flight. ``hands_over`` says
    whether reads that it has handed to the system count as begun for ``faults``, as they do not with threads.
    """

    plugin: ClassVar[str]
    provider: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    examples: ClassVar[int] = 40

    # ---- building

    def load(self) -> Provider[Fetcher]:
        """The provider under test, by name."""
        return load_provider("fetch", self.plugin, self.provider)

    @contextmanager
    def open(self, shards: Shards, *, lanes: int = 2, direct: bool = True, batch: int = BATCH) -> Iterator[Fetcher]:
        """A fetcher over these files; what this machine lacks is a reason to skip."""
        provider = self.load()
        missing = provider.available()
        if missing:
            pytest.skip(missing)
        made_up = cache_facts(8)
        facts = Facts(made_up.model, made_up.cache, FetchFacts(shards.paths, lanes, direct, batch))
        fetcher = provider.build(provider.options(**self.options), facts)
        try:
            yield fetcher
        finally:
            fetcher.close()

    @pytest.fixture(name="shards")
    def _shards(self, tmp_path: Path) -> Shards:
        return Shards(tmp_path)

    @contextmanager
    def faults(self) -> Iterator[Faults]:
        """What damages reads below the plugin and counts those in flight."""
        with pytest.MonkeyPatch.context() as patch:
            yield Faults(patch)

    def read(self, fetcher: Fetcher, target: Target) -> None:
        """One batch as the engine may ask for it, stage by stage; every promise is checked after every wait."""
        ticket = fetcher.submit(target.batch)
        assert ticket.nbytes == int(target.batch.length.sum())
        arrived = 0
        for stage in range(max(row.stage for row in target.rows) + 1):
            arrived = fetcher.wait(ticket, stage)
            assert target.wrong(stage) == [], f"after wait(upto={stage}) bytes of its stages are not the file's"
            assert arrived >= target.required(stage)
        assert fetcher.wait(ticket, 99) == arrived, "a second wait for everything counts other bytes"
        assert arrived <= ticket.nbytes
        assert not target.touched_between(), "memory beside the reads was written"
        target.region.close()

    # ---- bytes

    @pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
    @pytest.mark.parametrize("lanes", LANES)
    def test_bytes_are_the_files(self, shards: Shards, lanes: int, direct: bool) -> None:
        """Random batches of 1 read to the most, from several shards, up to the very end, in any number of stages."""
        row = st.integers(0, len(SIZES) - 1).flatmap(
            lambda shard: st.integers(0, (SIZES[shard] - 1) // PAGE).flatmap(
                lambda page: st.tuples(
                    st.just(shard),
                    st.just(page),
                    st.integers(1, min(9, (SIZES[shard] - 1) // PAGE + 1 - page)),
                    st.integers(0, 3),
                )
            )
        )
        with self.open(shards, lanes=lanes, direct=direct) as fetcher:

            @settings(max_examples=self.examples, derandomize=True, database=None, deadline=None)
            @given(st.lists(row, min_size=1, max_size=BATCH))
            def check(rows: list[tuple[int, int, int, int]]) -> None:
                self.read(fetcher, Target(rows, shards.content))

            check()

    @pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
    def test_every_offset_and_length(self, shards: Shards, direct: bool) -> None:
        """Alone and as one batch, every page range of a file that ends inside a page."""
        pages = (SIZES[2] - 1) // PAGE + 1
        rows = [(2, first, count, 0) for first in range(pages) for count in range(1, pages - first + 1)]
        with self.open(shards, direct=direct) as fetcher:
            for row in rows:
                self.read(fetcher, Target([row], shards.content))
            self.read(fetcher, Target(rows, shards.content))

    @pytest.mark.parametrize("lanes", LANES)
    def test_the_largest_batch(self, shards: Shards, lanes: int) -> None:
        """As many reads as were announced, again and again."""
        rows = [(index % 2, index % 30, 1 + index % 5, index // 32) for index in range(BATCH)]
        with self.open(shards, lanes=lanes) as fetcher:
            for _ in range(5):
                self.read(fetcher, Target(rows, shards.content))

    # ---- direct

    def test_direct_is_true(self, shards: Shards) -> None:
        """A fetcher that says direct leaves nothing in the page cache, and one that is not says why."""
        with self.open(shards) as fetcher:
            assert fetcher.direct or fetcher.note, "not direct, and the note does not say why"
            if not fetcher.direct:
                return
            for path in shards.paths:
                _leave_cache(path)
            self.read(fetcher, Target([(0, 8, 24, 0)], shards.content))
            cached = _cached_bytes(shards.paths[0], 8 * PAGE, 24 * PAGE)
            if cached is None:
                pytest.skip("this system cannot tell what is in the page cache")
            assert not cached, f"{cached} bytes of direct reads are in the page cache"

    def test_buffered_reads_leave_nothing_in_the_page_cache(self, shards: Shards) -> None:
        """Whatever they filled has been given back when the fetcher is closed."""
        _leave_cache(shards.paths[0])
        with self.open(shards, direct=False) as fetcher:
            self.read(fetcher, Target([(0, 8, 12, 0), (0, 20, 12, 1)], shards.content))
        cached = _cached_bytes(shards.paths[0], 9 * PAGE, 22 * PAGE)  # the outer pages may be shared with others
        if cached is None:
            pytest.skip("this system cannot tell what is in the page cache")
        assert not cached, f"{cached} bytes of buffered reads are still in the page cache"

    def test_a_file_in_memory_is_not_read_directly(self) -> None:
        """A tmpfs grants O_DIRECT, but there is nothing to bypass: saying direct would be a lie."""
        folder = next((mount for mount in ("/dev/shm", "/run") if _is_tmpfs(mount)), None)  # noqa: S108
        if folder is None:
            pytest.skip("this system has no file system in memory to try")
        with tempfile.TemporaryDirectory(dir=folder) as name:
            shards = Shards(Path(name))
            with self.open(shards) as fetcher:
                assert not fetcher.direct
                assert fetcher.note, "not direct, and the note does not say why"
                self.read(fetcher, Target([(0, 8, 24, 0), (2, 3, 2, 1)], shards.content))

    def test_buffered_if_so_asked(self, shards: Shards) -> None:
        """Nobody claims direct reads that were not asked for, and that needs no excuse."""
        with self.open(shards, direct=False) as fetcher:
            assert (fetcher.direct, fetcher.note) == (False, "")

    def test_a_file_that_refuses_direct_reads_is_read_buffered(self, shards: Shards) -> None:
        """EINVAL at the first read, after an open that succeeded, is found while opening; the note says so."""
        with self.open(shards) as fetcher:
            if not fetcher.direct:
                pytest.skip(f"no direct reads here in any case: {fetcher.note}")
        with self.faults() as faults:
            with faults.always(-errno.EINVAL), self.open(shards) as fetcher:
                told = (fetcher.direct, fetcher.note)
                with faults.never():
                    self.read(fetcher, Target([(0, 3, 2, 0), (1, 36, 2, 1)], shards.content))
            assert faults.met, "the fault was never met: override faults()"
        assert not told[0]
        assert os.strerror(errno.EINVAL) in told[1]

    # ---- errors

    @pytest.mark.parametrize("fault", sorted(FAULTS))
    @pytest.mark.parametrize("nth", [1, 5, 24])
    @pytest.mark.parametrize("lanes", LANES)
    def test_a_failed_read_is_an_error(self, shards: Shards, lanes: int, nth: int, fault: str) -> None:
        """ReadError names file, offset, length and reason; nothing is in flight; the next batch is served."""
        rows = [(index % 2, index, 1, index // 8) for index in range(24)]
        with self.open(shards, lanes=lanes) as fetcher, self.faults() as faults:
            target = Target(rows, shards.content)
            with faults.once(nth, FAULTS[fault]):
                message = self._error(fetcher, target)
            assert faults.met, "the fault was never met: override faults()"
            assert faults.in_flight == 0, f"{faults.in_flight} reads are in flight after the error"
            assert _names(message, target.rows, shards.paths), f"{message!r} does not name file, offset and length"
            reason = "truncated" if fault == "short" else f"{os.strerror(-FAULTS[fault])} ({fault})"
            assert reason in message
            target.region.close()
            for _ in range(3):
                self.read(fetcher, Target(rows, shards.content))

    @pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
    def test_a_file_that_was_truncated_is_an_error(self, shards: Shards, direct: bool) -> None:
        """What lies beyond the new end cannot be read, what lies before it can; whole again, all of it can."""
        gone, there = (1, 30, 4, 1), (1, 2, 3, 0)
        with self.open(shards, direct=direct) as fetcher:
            os.truncate(shards.paths[1], 31 * PAGE)
            target = Target([there, gone], shards.content)
            message = self._error(fetcher, target)
            assert _names(message, target.rows[1:], shards.paths), f"{message!r} does not name file, offset and length"
            assert str(31 * PAGE) in message, f"{message!r} does not say how long the file is"
            target.region.close()
            self.read(fetcher, Target([there], shards.content))
            shards.restore(1)
            self.read(fetcher, Target([there, gone], shards.content))

    @pytest.mark.parametrize("nth", [1, 7])
    def test_an_interrupt_ends_its_batch(self, shards: Shards, nth: int) -> None:
        """Ctrl-C while the caller reads or waits is passed on; nothing is in flight; the next batch is served."""
        rows = [(index % 2, index, 1, index // 4) for index in range(12)]
        told: list[object] = []

        def attempt() -> None:
            with self.open(shards, lanes=1) as fetcher, self.faults() as faults:
                target = Target(rows, shards.content)
                with faults.interrupt(nth), contextlib.suppress(KeyboardInterrupt):
                    fetcher.wait(fetcher.submit(target.batch), 99)
                    told.append("the interrupt was swallowed")
                told.append(faults.in_flight)
                self.read(fetcher, Target(rows, shards.content))

        def guarded() -> None:
            try:
                attempt()
            except BaseException as error:  # noqa: BLE001 - it is raised below, in the test's own thread
                told.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "the fetcher waits for ever after an interrupt"
        if isinstance(told[-1], BaseException):
            raise told[-1]
        assert told == [0]

    def _error(self, fetcher: Fetcher, target: Target) -> str:
        with pytest.raises(ReadError) as caught:
            fetcher.wait(fetcher.submit(target.batch), 99)
        return str(caught.value)

    # ---- the end

    @pytest.mark.parametrize("lanes", LANES)
    def test_close_gives_everything_back(self, shards: Shards, lanes: int) -> None:
        """No descriptor and no thread is left; a second close does nothing."""
        with self.open(shards, lanes=lanes) as fetcher:  # what a first use allocates for good is not a leak
            self.read(fetcher, Target([(0, 0, 1, 0)], shards.content))
        before = _held()
        for _ in range(3):
            with self.open(shards, lanes=lanes) as fetcher:
                self.read(fetcher, Target([(0, 0, 1, 0), (1, 0, 1, 1)], shards.content))
                fetcher.close()
        assert _held() == before

    @pytest.mark.parametrize("waited", [None, 0], ids=["unwaited", "first-stage"])
    @pytest.mark.parametrize("lanes", LANES)
    def test_close_waits_for_what_is_in_flight(self, shards: Shards, lanes: int, waited: int | None) -> None:
        """After it no read writes into memory that may be gone."""
        rows = [(0, index % 60, 4, index // 12) for index in range(36)]
        with self.faults() as faults:
            before = _held()
            with self.open(shards, lanes=lanes) as fetcher:
                target = Target(rows, shards.content)
                ticket = fetcher.submit(target.batch)
                if waited is not None:
                    fetcher.wait(ticket, waited)
            assert faults.in_flight == 0, f"{faults.in_flight} reads are in flight after close"
            target.region.close()
            assert _held() == before


def _names(message: str, rows: Sequence[Read], paths: Sequence[str]) -> bool:
    def says(row: Read) -> bool:
        numbers = "".join(c if c.isdigit() else " " for c in message.replace(paths[row.shard], "", 1)).split()
        return paths[row.shard] in message and {str(row.offset), str(row.length)} <= set(numbers)

    return any(says(row) for row in rows)


def _held() -> tuple[int, list[str]]:
    """Open descriptors and living threads."""
    try:
        descriptors = len(os.listdir("/proc/self/fd"))
    except OSError:
        descriptors = 0
    return descriptors, sorted(thread.name for thread in threading.enumerate())


def _is_tmpfs(folder: str) -> bool:
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    return any(mount[1:3] == [folder, "tmpfs"] for mount in mounts) and os.access(folder, os.W_OK)


def _leave_cache(path: str) -> None:
    """Empty the page cache of a file, and see that it is empty: what a test finds there later came after this."""
    until = time.monotonic() + LEAVE_S
    fd = os.open(path, os.O_RDONLY)
    try:
        while True:
            os.fsync(fd)  # a page that is not written yet stays
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if not (held := _cached_bytes(path, 0, os.fstat(fd).st_size)):
                return
            assert time.monotonic() < until, f"{held} bytes of {path} do not leave the page cache"
            time.sleep(0.01)
    finally:
        os.close(fd)


def _cached_bytes(path: str, offset: int, nbytes: int) -> int | None:
    """Bytes of a file that are in the page cache, in whole pages; None if that cannot be told.

    A read that must not wait (RWF_NOWAIT) would not do: it starts a read-ahead, and a drive that is done with it before
    the kernel looks makes a page that was gone look cached.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        held = residency.resident_bytes(view.ctypes.data + offset, nbytes)
        del view  # or the mapping cannot be closed
    return held
