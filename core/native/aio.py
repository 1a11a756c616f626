"""Linux native asynchronous I/O by system call. Public to fetch plugins.

System call numbers and structures: ``include/uapi/linux/aio_abi.h`` and the syscall tables of x86-64 and aarch64.
Faults for tests are injected here by replacing the methods of :class:`AioCalls`.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import sys
from typing import Any

from bmoe.errors import NativeError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_CALLS = {
    "x86_64": {"setup": 206, "destroy": 207, "getevents": 208, "submit": 209},
    "aarch64": {"setup": 0, "destroy": 1, "submit": 2, "getevents": 4},
}


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


def missing() -> str:
    """Why native AIO cannot be used on this machine, or ""."""
    if not sys.platform.startswith("linux"):
        return f"native AIO is Linux only, this is {sys.platform}"
    if platform.machine() not in _CALLS:
        return f"no AIO system call numbers for {platform.machine()}"
    try:
        _try()
    except NativeError as error:
        return str(error)
    return ""


@functools.cache  # which keeps no exception: a refusal is tried again
def _try() -> None:
    """Make a context and destroy it; once, since the kernel takes some 30 ms to destroy one."""
    destroy(setup(1))


def _call(name: str) -> int:
    return _CALLS[platform.machine()][name]


def setup(depth: int) -> int:
    """Create a kernel AIO context for ``depth`` reads in flight; NativeError if refused."""
    context = ctypes.c_ulong(0)
    if _libc.syscall(_call("setup"), ctypes.c_uint(depth), ctypes.byref(context)) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise NativeError(f'io_setup({depth}) refused: {reason} (see fs.aio-max-nr); use fetch.plugin = "pread"')
    return context.value


def destroy(context: int) -> None:
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
