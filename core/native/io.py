"""Files opened for reads that bypass the page cache, and the plain read: what fetch plugins stand on. Public to them.

System call numbers and structures: Linux ``include/uapi/linux/stat.h`` and the syscall tables of x86-64 and aarch64.
Faults for tests are injected here, below every plugin, by replacing :func:`pread`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bmoe.errors import ModelError
from bmoe.native import memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pread.restype = ctypes.c_ssize_t
_libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong]
_libc.syscall.restype = ctypes.c_long

_STATX = {"x86_64": 332, "aarch64": 291}
_STATX_DIOALIGN, _AT_EMPTY_PATH = 0x2000, 0x1000
O_DIRECT = getattr(os, "O_DIRECT", 0)
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}  # include/uapi/linux/magic.h


def pread(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Read up to ``nbytes`` at ``offset`` into memory at ``address``; returns the count or a negative errno."""
    count = _libc.pread(fd, address, nbytes, offset)
    return int(count) if count >= 0 else -ctypes.get_errno()


@dataclass(slots=True)
class DataFile:
    """A model file opened for expert reads; ``direct`` if they bypass the page cache, else ``note`` says why not."""

    path: str
    fd: int
    nbytes: int
    direct: bool
    note: str

    def close(self) -> None:
        """Close the descriptor. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_data(path: str, *, direct: bool) -> DataFile:
    """Open a file for expert reads, direct if asked and if direct *reads* give the file's own bytes.

    Reads are of whole pages at page boundaries; where the device wants more than that they are buffered. Opening with
    O_DIRECT proves nothing: some file systems accept it and refuse the read, or return other bytes. So one page in the
    middle and the tail of the file are read both ways and compared. Raises ModelError if the file cannot be opened at
    all.
    """
    try:
        plain = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise ModelError(f"{path}: cannot open: {error.strerror}") from error
    nbytes = os.fstat(plain).st_size
    if not direct:
        return _buffered(path, plain, nbytes, "")
    if in_memory := _in_memory(plain):
        return DataFile(path, plain, nbytes, False, f"the file is in memory ({in_memory}), nothing can be bypassed")
    if not O_DIRECT:
        note = _bypass_elsewhere(plain)
        return DataFile(path, plain, nbytes, not note, note)
    if unsuitable := _unsuitable(direct_block(plain)):
        return _buffered(path, plain, nbytes, unsuitable)
    try:
        fd = os.open(path, os.O_RDONLY | O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return _buffered(path, plain, nbytes, f"direct I/O refused at open: {error.strerror}")
    note = _compare(fd, plain, nbytes)
    if note:
        os.close(fd)
        return _buffered(path, plain, nbytes, note)
    os.close(plain)
    return DataFile(path, fd, nbytes, True, "")


def _buffered(path: str, fd: int, nbytes: int, note: str) -> DataFile:
    """Experts lie anywhere: what the kernel would read ahead of them is as a rule not what comes next."""
    with contextlib.suppress(AttributeError, OSError):  # only advice, and not on every system
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return DataFile(path, fd, nbytes, False, note)


def direct_block(fd: int) -> int | None:
    """Bytes whose multiples direct reads of this file must begin at and have as length, in memory too.

    0 = no direct reads of this file; None = the kernel does not say (before Linux 6.1, or not this file system).
    """
    number = _STATX.get(platform.machine()) if sys.platform.startswith("linux") else None
    if number is None:
        return None
    facts = (ctypes.c_uint32 * 64)()  # struct statx
    if _libc.syscall(ctypes.c_long(number), fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, facts) != 0:
        return None
    if not facts[0] & _STATX_DIOALIGN:
        return None
    return max(facts[38], facts[39])  # stx_dio_mem_align, stx_dio_offset_align


def _unsuitable(block: int | None) -> str:
    if block is None or (block and memory.PAGE % block == 0):
        return ""
    if not block:
        return "this file system has no direct I/O for the file"
    return f"direct I/O takes blocks of {block} bytes here, and reads come in pages of {memory.PAGE}"


def _in_memory(fd: int) -> str:
    """The file system's name if its files are page cache: Linux grants O_DIRECT there, although it bypasses nothing."""
    if not sys.platform.startswith("linux"):
        return ""
    facts = (ctypes.c_ulong * 32)()  # struct statfs, which begins with the type
    if _libc.fstatfs(fd, facts) != 0:
        return ""
    return _IN_MEMORY.get(facts[0] & 0xFFFFFFFF, "")


def _bypass_elsewhere(fd: int) -> str:
    if not hasattr(fcntl, "F_NOCACHE"):
        return "this system has no direct I/O"
    try:
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
    except OSError as error:
        return f"F_NOCACHE refused: {error.strerror}"
    return ""


def _compare(fd: int, plain: int, nbytes: int) -> str:
    """Why direct reads of this file cannot be trusted, or ""."""
    page = memory.PAGE
    spare = memory.reserve(2 * page)
    try:
        for offset in (memory.round_down(nbytes // 2), memory.round_down(max(nbytes - 1, 0))):
            expected = os.pread(plain, page, offset)
            memory.fill(spare.address, 0xAA, page)
            count = pread(fd, spare.address, page, offset)
            if count < 0:
                return f"direct I/O refused at read: {os.strerror(-count)}"
            if count < len(expected) or bytes(memory.view(spare.address, len(expected))) != expected:
                return f"direct read at {offset} gave other bytes than a buffered one"
    finally:
        spare.close()
    return ""


class UsedPages:
    """Gives back the page cache that buffered reads fill: an expert that is used is held in memory already.

    Only pages that lie wholly inside what was read are dropped, never those it shares with the weights around it. Many
    reads are given back together, as few ranges.
    """

    def __init__(self, opened: Sequence[DataFile], limit: int = 64 << 20) -> None:
        """``limit``: bytes after which the pages are dropped."""
        self._fds = [file.fd for file in opened]
        self._limit, self._bytes = limit, 0
        self._spans: list[tuple[Any, Any, Any]] = []

    def add(self, shard: Any, offset: Any, length: Any) -> None:
        """These reads are done; arrays of equal length."""
        self._spans.append((shard, offset, offset + length))
        self._bytes += int(length.sum())
        if self._bytes >= self._limit:
            self.drop()

    def drop(self) -> None:
        """Drop the pages of all reads so far."""
        spans, self._spans, self._bytes = self._spans, [], 0
        if not spans or not hasattr(os, "posix_fadvise"):
            return
        shard, begin, end = (np.concatenate(column) for column in zip(*spans, strict=True))
        for index, fd in enumerate(self._fds):
            mine = shard == index
            for first, last in _joined(begin[mine], end[mine]):
                first, last = first + memory.PAGE, last - memory.PAGE
                if first < last:
                    with contextlib.suppress(OSError):  # only advice
                        os.posix_fadvise(fd, first, last - first, os.POSIX_FADV_DONTNEED)


def _joined(begin: Any, end: Any) -> Iterator[tuple[int, int]]:
    """The ranges that spans cover, overlapping and adjacent ones as one."""
    if not len(begin):
        return
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    cuts = np.flatnonzero(begin[1:] > reach[:-1]) + 1
    firsts, lasts = begin[np.r_[0, cuts]], reach[np.r_[cuts - 1, len(reach) - 1]]
    yield from zip(firsts.tolist(), lasts.tolist(), strict=True)


def describe(file: DataFile, offset: int, nbytes: int, result: int, required: int) -> str:
    """The text of a ReadError: file, offset, length and errno, or how short the read was."""
    where = f"{file.path}: read of {nbytes} bytes at offset {offset}"
    if result < 0:
        name = errno.errorcode.get(-result, str(-result))
        return f"{where} failed: {os.strerror(-result)} ({name}); check the drive"
    size = _size_now(file)
    return f"{where} ended after {result} of {required} bytes; the file has {size} bytes now, was it truncated?"


def _size_now(file: DataFile) -> Any:
    try:
        return os.fstat(file.fd).st_size
    except OSError:
        return "gone, in"
