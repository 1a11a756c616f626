"""Android hardware buffers as plain memory: the kernel neither reclaims nor compresses their pages. Public to plugins.

Declarations: ``android/hardware_buffer.h`` of the NDK, from API level 26. Nothing here was run on a device yet.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from bmoe.errors import NativeError
from bmoe.native import memory

MOST = memory.round_down(2**31 - 1)
"""Bytes of one buffer: its width counts them, and locking 2 GiB fails."""

_BLOB = 0x21
_READ_OFTEN, _WRITE_OFTEN = 3, 3 << 4
_USAGE = _READ_OFTEN | _WRITE_OFTEN


class Description(ctypes.Structure):
    """``AHardwareBuffer_Desc``: for a blob, ``width`` is its bytes and the other sizes are 1."""

    _fields_ = [
        ("width", ctypes.c_uint32),
        ("height", ctypes.c_uint32),
        ("layers", ctypes.c_uint32),
        ("format", ctypes.c_uint32),
        ("usage", ctypes.c_uint64),
        ("stride", ctypes.c_uint32),
        ("reserved0", ctypes.c_uint32),
        ("reserved1", ctypes.c_uint64),
    ]


def missing(library: str = "libandroid.so") -> str:
    """Why there are no hardware buffers here, or ""."""
    try:
        _declare(library)
    except NativeError as error:
        return str(error)
    return ""


class HardwareBuffer:
    """``nbytes`` at the page-aligned ``address``, locked for the processor until it is closed."""

    def __init__(self, nbytes: int, library: str = "libandroid.so") -> None:
        """Allocate and lock; NativeError if the system refuses, or gives an address that is no page's."""
        if not 0 < nbytes <= MOST:
            raise NativeError(f"a hardware buffer holds 1 to {MOST} bytes, not {nbytes}")
        self._calls = calls = _declare(library)
        self._handle = ctypes.c_void_p()
        self._locked = False
        self.nbytes = nbytes
        wanted = Description(width=nbytes, height=1, layers=1, format=_BLOB, usage=_USAGE)
        code = calls.AHardwareBuffer_allocate(ctypes.byref(wanted), ctypes.byref(self._handle))
        if code != 0:
            raise NativeError(f"a hardware buffer of {nbytes} bytes was refused: {os.strerror(abs(code))}")
        address = ctypes.c_void_p()
        code = calls.AHardwareBuffer_lock(self._handle, _USAGE, -1, None, ctypes.byref(address))
        self._locked = code == 0
        self.address = address.value or 0
        if code != 0 or not self.address or self.address % memory.PAGE:
            self.close()
            why = os.strerror(abs(code)) if code else f"its address is {address.value}, which is no page's"
            raise NativeError(f"a hardware buffer of {nbytes} bytes cannot be locked: {why}")

    def close(self) -> None:
        """Unlock and release. May be called twice."""
        if self._locked:
            self._locked = False
            self._calls.AHardwareBuffer_unlock(self._handle, None)
        if self._handle.value:
            self._calls.AHardwareBuffer_release(self._handle)
            self._handle = ctypes.c_void_p()


def _declare(library: str) -> Any:
    try:
        calls = ctypes.CDLL(library)
        pointer, number, flags = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint64
        signatures: tuple[tuple[Any, Any, list[Any]], ...] = (
            (calls.AHardwareBuffer_allocate, ctypes.c_int, [pointer, pointer]),
            (calls.AHardwareBuffer_lock, ctypes.c_int, [pointer, flags, number, pointer, pointer]),
            (calls.AHardwareBuffer_unlock, ctypes.c_int, [pointer, pointer]),
            (calls.AHardwareBuffer_release, None, [pointer]),
        )
    except (OSError, AttributeError):
        raise NativeError(f"hardware buffers are Android's, from version 8 on; {library} has none here") from None
    for function, result, arguments in signatures:
        function.restype, function.argtypes = result, arguments
    return calls
