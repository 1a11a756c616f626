"""Files and asynchronous reads by system call: the lowest level that fetch plugins stand on. Public to them.

System call numbers and structures: Linux ``include/uapi/linux/aio_abi.h`` and the syscall tables of x86-64 and aarch64.
Faults for tests are injected here, below every plugin, by replacing :func:`pread` and :func:`collect`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import platform
import sys
from dataclasses import dataclass
from typing import Any

from bmoe.errors import ModelError, NativeError
from bmoe.native import memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pread.restype = ctypes.c_ssize_t
_libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong]
_libc.syscall.restype = ctypes.c_long

_AIO_CALLS = {
    "x86_64": {"setup": 206, "destroy": 207, "getevents": 208, "submit": 209},
    "aarch64": {"setup": 0, "destroy": 1, "submit": 2, "getevents": 4},
}
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

    Opening with O_DIRECT proves nothing: some file systems accept it and refuse the read, or return other bytes. So one
    page in the middle and the tail of the file are read both ways and compared. Raises ModelError if the file cannot be
    opened at all.
    """
    try:
        plain = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise ModelError(f"{path}: cannot open: {error.strerror}") from error
    nbytes = os.fstat(plain).st_size
    if not direct:
        return DataFile(path, plain, nbytes, False, "")
    if in_memory := _in_memory(plain):
        return DataFile(path, plain, nbytes, False, f"the file is in memory ({in_memory}), nothing can be bypassed")
    if not O_DIRECT:
        note = _bypass_elsewhere(plain)
        return DataFile(path, plain, nbytes, not note, note)
    try:
        fd = os.open(path, os.O_RDONLY | O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return DataFile(path, plain, nbytes, False, f"direct I/O refused at open: {error.strerror}")
    note = _compare(fd, plain, nbytes)
    os.close(fd if note else plain)
    return DataFile(path, plain if note else fd, nbytes, not note, note)


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


class Iocb(ctypes.Structure):
    """``struct iocb``, 64 bytes."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("result_fd", ctypes.c_uint32),
    ]


IOCB_DTYPE: Any = {
    "names": ["data", "key", "rw_flags", "opcode", "priority", "fd", "buffer", "nbytes", "offset"],
    "formats": ["<u8", "<u4", "<i4", "<u2", "<i2", "<u4", "<u8", "<u8", "<i8"],
    "offsets": [0, 8, 12, 16, 18, 20, 24, 32, 40],
    "itemsize": 64,
}
"""numpy's description of :class:`Iocb`, so that a batch is filled by columns."""

EVENT_DTYPE = [("data", "<u8"), ("object", "<u8"), ("result", "<i8"), ("result2", "<i8")]
"""numpy's description of ``struct io_event``."""


def aio_missing() -> str:
    """Why native AIO cannot be used on this machine, or ""."""
    if not sys.platform.startswith("linux"):
        return f"native AIO is Linux only, this is {sys.platform}"
    if platform.machine() not in _AIO_CALLS:
        return f"no AIO system call numbers for {platform.machine()}"
    try:
        _try_aio()
    except NativeError as error:
        return str(error)
    return ""


@functools.cache  # which keeps no exception: a refusal is tried again
def _try_aio() -> None:
    """Make a context and destroy it; once, since the kernel takes some 30 ms to destroy one."""
    aio_destroy(aio_setup(1))


def _call(name: str) -> int:
    return _AIO_CALLS[platform.machine()][name]


def aio_setup(depth: int) -> int:
    """Create a kernel AIO context for ``depth`` reads in flight; NativeError if refused."""
    context = ctypes.c_ulong(0)
    if _libc.syscall(_call("setup"), ctypes.c_uint(depth), ctypes.byref(context)) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise NativeError(f'io_setup({depth}) refused: {reason} (see fs.aio-max-nr); use fetch.plugin = "pread"')
    return context.value


def aio_destroy(context: int) -> None:
    """Wait for what is in flight and destroy the context."""
    _libc.syscall(_call("destroy"), ctypes.c_ulong(context))


class AioCalls:
    """io_submit and io_getevents on one context, with system call numbers looked up once."""

    def __init__(self, context: int) -> None:
        self._context = ctypes.c_ulong(context)
        self._submit = ctypes.c_long(_call("submit"))
        self._getevents = ctypes.c_long(_call("getevents"))

    def submit(self, pointers: int, count: int) -> int:
        """Submit ``count`` iocbs whose pointers are stored at address ``pointers``; how many were taken, or -errno."""
        while True:
            taken = _libc.syscall(self._submit, self._context, ctypes.c_long(count), ctypes.c_void_p(pointers))
            if taken >= 0:
                return int(taken)
            if ctypes.get_errno() != errno.EINTR:
                return -ctypes.get_errno()

    def collect(self, least: int, most: int, events: int) -> int:
        """Wait for at least ``least`` completions and store up to ``most`` io_events at address ``events``."""
        while True:
            count = _libc.syscall(
                self._getevents,
                self._context,
                ctypes.c_long(least),
                ctypes.c_long(most),
                ctypes.c_void_p(events),
                None,
            )
            if count >= 0:
                return int(count)
            if ctypes.get_errno() != errno.EINTR:
                raise NativeError(f"io_getevents failed: {os.strerror(ctypes.get_errno())}")


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
