"""What the device asks of direct reads is found out, and buffered reads leave the page cache as it was."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from bmoe.errors import NativeError
from bmoe.native import io, memory, residency, uring

PAGE = memory.PAGE


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> str:
    path = tmp_path / "data"
    with open(path, "wb") as file:
        file.write(os.urandom(64 * PAGE + 100))
        file.flush()
        os.fsync(file.fileno())
    return str(path)


def test_the_block_of_the_device_is_asked_for(path: str) -> None:
    with open(path, "rb") as file:
        block = io.direct_block(file.fileno())
    with open("/proc/self/maps", "rb") as file:
        odd = io.direct_block(file.fileno())

    assert block is None or block == 0 or block & (block - 1) == 0
    assert not odd
    assert io.direct_block(-1) is None


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (None, ""),
        (512, ""),
        (PAGE, ""),
        (0, "this file system has no direct I/O for the file"),
        (16 * PAGE, f"direct I/O takes blocks of {16 * PAGE} bytes here, and reads come in pages of {PAGE}"),
    ],
)
def test_a_block_that_does_not_suit_means_buffered_reads(
    path: str, monkeypatch: pytest.MonkeyPatch, block: int | None, said: str
) -> None:
    before = io.open_data(path, direct=True)
    before.close()
    monkeypatch.setattr(io, "direct_block", lambda fd: block)
    file = io.open_data(path, direct=True)
    file.close()

    assert (file.direct, file.note) == ((before.direct, before.note) if not said else (False, said))


def cached(fd: int, pages: range) -> list[int]:
    """Which pages of a file a read would find in memory."""
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        found = [page for page in pages if residency.resident_bytes(view.ctypes.data + page * PAGE, PAGE)]
        del view  # or the mapping cannot be closed
    return found


def test_used_pages_are_given_back_but_not_those_at_the_edges(path: str) -> None:
    file = io.open_data(path, direct=False)
    used = io.UsedPages([file])
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.pread(file.fd, 64 * PAGE, 0)
    offset = np.array([8, 12, 30]) * PAGE
    used.add(np.zeros(3, dtype=np.int64), offset, np.array([4, 4, 2]) * PAGE)
    assert set(range(8, 16)) <= set(cached(file.fd, range(64))), "dropped before there was enough of it"
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_RANDOM)
    used.drop()

    kept = cached(file.fd, range(64))
    assert [] == [page for page in kept if 9 <= page < 15], "adjacent reads are one range, and it is dropped"
    assert {7, 8, 15, 16, 29, 30, 31, 32} <= set(kept)
    file.close()


def test_used_pages_are_dropped_by_themselves_after_so_many(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    file = io.open_data(path, direct=False)
    used = io.UsedPages([file], limit=16 * PAGE)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: told.append((offset, length)))
    zeros = np.zeros(2, dtype=np.int64)
    for first in (0, 20):
        assert [] == told
        used.add(zeros, np.array([first + 4, first]) * PAGE, np.array([4, 6]) * PAGE)

    assert [(PAGE, 6 * PAGE), (21 * PAGE, 6 * PAGE)] == told
    file.close()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EPERM, "io_uring is forbidden here, by kernel.io_uring_disabled or by the sandbox (seccomp)"),
        (errno.ENOSYS, "this kernel has no io_uring"),
        (errno.ENOMEM, "raise the limit of locked memory (ulimit -l)"),
        (errno.EMFILE, "io_uring_setup refused: Too many open files"),
    ],
)
def test_a_kernel_without_io_uring_says_why(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    monkeypatch.setattr(uring, "set_up", lambda entries, params: -code)
    monkeypatch.setattr(uring.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(uring.sys, "platform", "linux")

    assert said in uring.missing()
    with pytest.raises(NativeError):
        uring.Ring(8)


def test_an_old_kernel_or_another_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(uring, "set_up", lambda entries, params: 77)
    monkeypatch.setattr(uring.os, "close", closed.append)
    monkeypatch.setattr(uring.platform, "machine", lambda: "x86_64")
    assert "too old" in uring.missing()
    assert [77] == closed
    monkeypatch.setattr(uring.platform, "machine", lambda: "mips")
    assert "mips" in uring.missing()
    monkeypatch.setattr(uring.sys, "platform", "darwin")
    assert "darwin" in uring.missing()


@pytest.mark.skipif(bool(uring.missing()), reason="no io_uring here")
def test_a_ring_goes_round_many_times_and_counts_what_is_out(path: str) -> None:
    """Heads and tails wrap; what was not collected is seen by the kernel's counts alone."""
    ring = uring.Ring(4)
    region = memory.reserve(16 * PAGE)
    with open(path, "rb") as file:
        content = file.read()
        entries = np.zeros(3, dtype=np.dtype(uring.ENTRY_DTYPE))
        entries["opcode"], entries["fd"], entries["length"] = uring.READ, file.fileno(), PAGE
        for turn in range(40):
            entries["identity"] = 1 + turn * 3 + np.arange(3)
            entries["offset"] = (turn + np.arange(3)) % 60 * PAGE
            entries["address"] = region.address + np.arange(3) * PAGE
            memory.fill(region.address, 0xAA, 3 * PAGE)
            assert ring.submit(entries, 0, 3) == 3
            if turn % 5 == 4:
                ring.drain()
                assert ring.collect(0) == []
            else:
                ended = dict(ring.collect(3))
                assert ended == dict.fromkeys(entries["identity"].tolist(), PAGE)
            for index, offset in enumerate(entries["offset"].tolist()):
                assert bytes(memory.view(region.address + index * PAGE, PAGE)) == content[offset : offset + PAGE]
    ring.close()
    ring.close()
    region.close()
