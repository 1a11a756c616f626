"""io_uring by system call, without liburing: one ring, reads only, no polling thread. Public to fetch plugins.

Numbers and structures: Linux ``include/uapi/linux/io_uring.h``; the system call numbers are the same on x86-64 and
aarch64. Faults for tests are injected here by replacing the methods of :class:`Ring`.

Why plain loads and stores of the ring's heads and tails are right. Submission: no other thread of the kernel looks at
the queue (there is no SQPOLL); it is read inside ``io_uring_enter``, on the thread and after the stores of which that
is a system call, so program order is all that is needed, on any machine. Completion: another processor may write
entries and then the tail (a store-release). We take ``n`` entries only after an enter with ``GETEVENTS`` and
``min_complete = n`` has returned without an error: then the kernel, on this very thread, has seen a tail that covers
them, with the barrier that belongs to it, and a system call and its return lie before our loads. A tail that we see
for ourselves only says for how many to ask. An entry's place is written again only after as many more reads as the
queue has places, hence after another enter of ours: our loads and the store of the head are over by then. Heads and
tails are aligned 32-bit integers, which ctypes loads and stores in one access.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from typing import Any

import numpy as np

from bmoe.errors import NativeError
from bmoe.native import memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_U32 = ctypes.c_uint32
_SETUP, _ENTER = 425, 426
_MACHINES = ("x86_64", "aarch64")
_GETEVENTS = 1
READ = 22  # IORING_OP_READ
_COOP_TASKRUN, _CLAMP = 1 << 8, 1 << 4
_SINGLE_MMAP, _RW_CUR_POS = 1, 1 << 3  # Linux 5.4; 5.6, which also brought IORING_OP_READ
_OFF_SQES = 0x10000000

ENTRY_DTYPE: Any = {
    "names": ["opcode", "flags", "ioprio", "fd", "offset", "address", "length", "identity"],
    "formats": ["u1", "u1", "<u2", "<i4", "<u8", "<u8", "<u4", "<u8"],
    "offsets": [0, 1, 2, 4, 8, 16, 24, 32],
    "itemsize": 64,
}
"""numpy's description of ``struct io_uring_sqe``, as far as a read needs it."""


class _SubmissionOffsets(ctypes.Structure):
    """``struct io_sqring_offsets``."""

    _fields_ = [
        ("head", _U32),
        ("tail", _U32),
        ("mask", _U32),
        ("entries", _U32),
        ("flags", _U32),
        ("dropped", _U32),
        ("array", _U32),
        ("reserved", _U32 * 3),
    ]


class _CompletionOffsets(ctypes.Structure):
    """``struct io_cqring_offsets``."""

    _fields_ = [
        ("head", _U32),
        ("tail", _U32),
        ("mask", _U32),
        ("entries", _U32),
        ("overflow", _U32),
        ("entry", _U32),
        ("flags", _U32),
        ("reserved", _U32 * 3),
    ]


class _Params(ctypes.Structure):
    """``struct io_uring_params``."""

    _fields_ = [
        ("sq_entries", _U32),
        ("cq_entries", _U32),
        ("flags", _U32),
        ("cpu", _U32),
        ("idle", _U32),
        ("features", _U32),
        ("workers", _U32),
        ("reserved", _U32 * 3),
        ("sq", _SubmissionOffsets),
        ("cq", _CompletionOffsets),
    ]


def missing() -> str:
    """Why io_uring cannot be used on this machine, in one sentence, or ""."""
    if not sys.platform.startswith("linux"):
        return f"io_uring is Linux only, this is {sys.platform}"
    if platform.machine() not in _MACHINES:
        return f"io_uring was not tried on {platform.machine()}"
    try:
        Ring(1).close()
    except NativeError as error:
        return str(error)
    return ""


def set_up(entries: int, params: Any) -> int:
    """io_uring_setup: the ring's descriptor, or -errno."""
    fd = int(_libc.syscall(ctypes.c_long(_SETUP), ctypes.c_uint(entries), ctypes.byref(params)))
    return fd if fd >= 0 else -ctypes.get_errno()


class Ring:
    """One ring with room for ``entries`` reads in flight (rounded up to a power of two)."""

    def __init__(self, entries: int) -> None:
        """Set it up and map it. Raises NativeError saying why the kernel refuses."""
        params = self._setup(entries)
        self.entries = params.sq_entries
        sq, cq = params.sq, params.cq
        nbytes = max(sq.array + 4 * params.sq_entries, cq.entry + 16 * params.cq_entries)
        self._regions: list[memory.Region] = []
        try:
            self._regions.append(memory.map_shared(self.fd, nbytes, 0))
            self._regions.append(memory.map_shared(self.fd, 64 * params.sq_entries, _OFF_SQES))
        except NativeError:
            self.close()
            raise
        ring, entries_at = (region.address for region in self._regions)
        self._sq_head, self._sq_tail = (ctypes.c_uint32.from_address(ring + at) for at in (sq.head, sq.tail))
        self._cq_head, self._cq_tail = (ctypes.c_uint32.from_address(ring + at) for at in (cq.head, cq.tail))
        order = np.frombuffer(memory.view(ring + sq.array, 4 * params.sq_entries), dtype="<u4")
        order[:] = np.arange(params.sq_entries)
        self._entries = np.frombuffer(memory.view(entries_at, 64 * params.sq_entries), dtype=np.dtype("V64"))
        self._sq_mask, self._cq_mask = params.sq_entries - 1, params.cq_entries - 1
        completed = memory.view(ring + cq.entry, 16 * params.cq_entries)
        self._identities = np.frombuffer(completed, dtype="<u8")[::2]
        self._results = np.frombuffer(completed, dtype="<i4")[2::4]

    def _setup(self, entries: int) -> _Params:
        for flags in (_CLAMP | _COOP_TASKRUN, _CLAMP):  # COOP_TASKRUN: Linux 5.19, completions do not interrupt us
            params = _Params(flags=flags)
            self.fd = set_up(entries, params)
            if self.fd != -errno.EINVAL:
                break
        if self.fd < 0:
            raise NativeError(_refusal(-self.fd))
        if not params.features & _SINGLE_MMAP or not params.features & _RW_CUR_POS:
            os.close(self.fd)
            self.fd = -1
            raise NativeError(f"this kernel's io_uring is too old to read with (Linux {platform.release()}, not 5.6)")
        return params

    def submit(self, entries: np.ndarray, first: int, count: int) -> int:
        """Submit ``count`` entries (:data:`ENTRY_DTYPE`) from ``first``; how many were taken, or -errno."""
        tail = self._sq_tail.value
        at = tail & self._sq_mask
        whole = min(count, self.entries - at)
        raw = entries.view("V64")
        self._entries[at : at + whole] = raw[first : first + whole]
        if whole < count:
            self._entries[: count - whole] = raw[first + whole : first + count]
        self._sq_tail.value = tail + count
        taken = self._enter(count, 0, 0)
        if taken < count:  # what was not taken is no longer offered
            self._sq_tail.value = self._sq_head.value
        return taken

    def collect(self, least: int) -> list[tuple[int, int]]:
        """Wait for ``least`` reads to end; identity and result (bytes or -errno) of each that has ended."""
        head = self._cq_head.value
        if not least:
            self._await(0)  # lets the kernel post what has ended
        want = max(least, (self._cq_tail.value - head) & 0xFFFFFFFF)
        if not want:
            return []
        self._await(want)
        at = head & self._cq_mask
        if at + want <= self._cq_mask + 1:
            ended = slice(at, at + want)
            identities, results = self._identities[ended].tolist(), self._results[ended].tolist()
        else:
            places = np.arange(head, head + want) & self._cq_mask
            identities, results = self._identities[places].tolist(), self._results[places].tolist()
        self._cq_head.value = head + want
        return list(zip(identities, results, strict=True))

    def drain(self) -> None:
        """Wait until nothing is in flight, by the kernel's own counts, and forget what has ended."""
        while True:
            left = (self._sq_head.value - self._cq_tail.value) & 0xFFFFFFFF
            unseen = (self._cq_tail.value - self._cq_head.value) & 0xFFFFFFFF
            if not left:
                break
            self._await(unseen + left)
        self._sq_tail.value = self._sq_head.value
        self._cq_head.value = self._cq_tail.value

    def close(self) -> None:
        """Unmap and close. May be called twice; nothing may be in flight, since the kernel does not wait for it."""
        for region in self._regions:
            region.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _await(self, least: int) -> None:
        result = self._enter(0, least, _GETEVENTS)
        if result < 0:
            raise NativeError(f"io_uring_enter failed: {os.strerror(-result)}")

    def _enter(self, submit: int, least: int, flags: int) -> int:
        while True:
            result = int(
                _libc.syscall(
                    ctypes.c_long(_ENTER),
                    ctypes.c_uint(self.fd),
                    ctypes.c_uint(submit),
                    ctypes.c_uint(least),
                    ctypes.c_uint(flags),
                    None,
                    ctypes.c_size_t(0),
                )
            )
            if result >= 0:
                return result
            code = ctypes.get_errno()
            if code != errno.EINTR:
                return -code


def _refusal(code: int) -> str:
    if code == errno.EPERM:
        return "io_uring is forbidden here, by kernel.io_uring_disabled or by the sandbox (seccomp)"
    if code == errno.ENOSYS:
        return f"this kernel has no io_uring (Linux {platform.release()}), or the sandbox hides it (seccomp)"
    if code == errno.ENOMEM:
        return "io_uring gets no memory; raise the limit of locked memory (ulimit -l)"
    return f"io_uring_setup refused: {os.strerror(code)}"
