"""Which pages are in memory, and how to keep them there: mincore, mlock and its limit. Public to dense plugins."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

from bmoe.errors import NativeError
from bmoe.native import memory

_CAP_IPC_LOCK = 14  # include/uapi/linux/capability.h
_WINDOW = 64 << 20  # bytes asked about in one call; the kernel answers a byte per page

_libc = ctypes.CDLL(None, use_errno=True)
_P, _N = ctypes.c_void_p, ctypes.c_size_t
_libc.mincore.argtypes = [_P, _N, _P]
_libc.mlock.argtypes = [_P, _N]


def resident_bytes(address: int, nbytes: int) -> int | None:
    """Bytes of ``[address, address + nbytes)`` that are in memory, counted in whole pages; None if unmeasured.

    Of a file mapping the page cache counts, whether this process has touched it or not.
    """
    if nbytes <= 0:
        return 0
    first, last = memory.round_down(address), memory.round_up(address + nbytes)
    answer = (ctypes.c_ubyte * (min(_WINDOW, last - first) // memory.PAGE))()
    pages = 0
    for start in range(first, last, _WINDOW):
        size = min(_WINDOW, last - start)
        if _libc.mincore(start, size, answer) != 0:
            return None
        pages += sum(value & 1 for value in bytes(answer)[: size // memory.PAGE])
    return pages * memory.PAGE


def lock(address: int, nbytes: int) -> None:
    """Bring pages in and keep them in memory until they are unmapped; NativeError with the remedy if refused."""
    if nbytes > 0 and _libc.mlock(address, nbytes) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise NativeError(f"mlock of {nbytes} bytes refused: {reason}; {_facts()}{_REMEDY}")


_REMEDY = "raise it (ulimit -l, systemd LimitMEMLOCK=), grant CAP_IPC_LOCK, or choose another dense.placement"


def lock_refusal(nbytes: int) -> str:
    """Why this process may not lock ``nbytes`` more, in one line with the remedy, or "" if it may.

    Who has CAP_IPC_LOCK has no limit; for all others what is locked already counts.
    """
    if _privileged():
        return ""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or _locked() + nbytes <= limit:
        return ""
    held = f" beside {_locked()} that are locked" if _locked() else ""
    return f"dense weights need {nbytes} bytes locked{held}; {_facts()}{_REMEDY}"


def _facts() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return f"the limit (RLIMIT_MEMLOCK) is {'none' if limit == resource.RLIM_INFINITY else limit}; "


def _status(key: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return line.partition(":")[2].strip()
    return ""


def _privileged() -> bool:
    mask = _status("CapEff")
    return bool(int(mask, 16) >> _CAP_IPC_LOCK & 1) if mask else os.geteuid() == 0


def _locked() -> int:
    words = _status("VmLck").split()
    return int(words[0]) * 1024 if words else 0
