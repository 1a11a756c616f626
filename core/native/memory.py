"""Reserved memory by system call: regions, advice, release, page recycling. Public to fetch and dense plugins.

Addresses are plain integers. Nothing here knows what an expert is.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bmoe.errors import NativeError

PAGE = mmap.PAGESIZE
_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10
_PROT_NONE = 0
_MREMAP = 1 | 2 | 4  # MAYMOVE | FIXED | DONTUNMAP
_MADV_NORMAL, _MADV_RANDOM, _MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 0, 1, 4, 14, 15
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_P, _N = ctypes.c_void_p, ctypes.c_size_t
_libc.mmap.restype, _libc.mmap.argtypes = _P, [_P, _N, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_libc.munmap.argtypes = [_P, _N]
_libc.madvise.argtypes = [_P, _N, ctypes.c_int]
_libc.mprotect.argtypes = [_P, _N, ctypes.c_int]
if sys.platform.startswith("linux"):
    _libc.mremap.restype, _libc.mremap.argtypes = _P, [_P, _N, _N, ctypes.c_int, _P]


def round_down(value: int) -> int:
    """The page that ``value`` lies in."""
    return value & ~(PAGE - 1)


def round_up(value: int) -> int:
    """The first page boundary at or above ``value``."""
    return (value + PAGE - 1) & ~(PAGE - 1)


@dataclass(slots=True)
class Region:
    """``nbytes`` of reserved private memory at the page-aligned ``address``; pages exist only once written."""

    address: int
    nbytes: int

    def close(self) -> None:
        """Give the address range back. May be called twice."""
        if self.nbytes:
            _libc.munmap(self.address, self.nbytes)
            self.nbytes = 0


def reserve(nbytes: int, *, huge: bool = False) -> Region:
    """Reserve ``nbytes`` (rounded up to pages) without committing memory.

    ``huge`` asks for huge pages, for memory that will be used whole; otherwise they are refused, because a huge page
    would hold the neighbours of an entry too. Raises NativeError if the address space is not granted.
    """
    size = round_up(max(nbytes, 1))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if sys.platform.startswith("linux") else 0)
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address in (None, _FAILED):
        reason = os.strerror(ctypes.get_errno())
        raise NativeError(f"cannot reserve {size >> 20} MiB of address space: {reason}; raise the limit (ulimit -v)")
    if sys.platform.startswith("linux"):
        _libc.madvise(address, size, _MADV_HUGEPAGE if huge else _MADV_NOHUGEPAGE)
    return Region(int(address), size)


def refuse_huge(address: int, nbytes: int) -> None:
    """From now on no huge page comes into a range; those that are there stay until a part of them is released."""
    if sys.platform.startswith("linux"):
        _libc.madvise(address, nbytes, _MADV_NOHUGEPAGE)


def release(address: int, nbytes: int) -> None:
    """Return the pages of ``[address, address + nbytes)`` to the system; the range reads as zeros afterwards."""
    if nbytes > 0 and _libc.madvise(address, nbytes, _MADV_DONTNEED) != 0:
        raise NativeError(f"madvise(DONTNEED) of {nbytes} bytes failed: {os.strerror(ctypes.get_errno())}")


def recycle(source: int, target: int, nbytes: int) -> bool:
    """Move the pages of ``source`` under ``target`` without copying, zeroing or faulting; ``source`` becomes empty.

    Both are page-aligned private anonymous ranges. Returns False, having changed nothing, where the kernel does not
    support it (before Linux 5.7; before 6.17 also if ``source`` was itself put together from moved pages) or no mapping
    is left; the caller releases instead.
    """
    if not sys.platform.startswith("linux"):
        return False
    if _libc.mremap(source, nbytes, nbytes, _MREMAP, target) == target:
        return True
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOMEM, errno.EFAULT):
        raise NativeError(f"mremap of {nbytes} bytes failed: {os.strerror(code)}")
    # some kernels unmap the target before they look at the source
    _map_fresh(target, nbytes)
    return False


def _map_fresh(address: int, nbytes: int) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    if _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        raise NativeError(f"cannot map {nbytes} bytes of memory again: {os.strerror(ctypes.get_errno())}")
    _libc.madvise(address, nbytes, _MADV_NOHUGEPAGE)


def forbid(address: int, nbytes: int) -> None:
    """Replace a page-aligned range by inaccessible, unreserved memory: whatever was mapped there is gone."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    if _libc.mmap(address, nbytes, _PROT_NONE, flags, -1, 0) != address:
        raise NativeError(f"cannot make {nbytes} bytes inaccessible: {os.strerror(ctypes.get_errno())}")


def map_file(address: int, nbytes: int, fd: int, offset: int, *, readable: bool = True) -> None:
    """Map a page-aligned part of a file, shared and read-only, at exactly this address.

    What is not ``readable`` yet is passed over by a populate that is under way; see :func:`allow_reading`.
    """
    access = mmap.PROT_READ if readable else _PROT_NONE
    if _libc.mmap(address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) != address:
        raise NativeError(f"cannot map {nbytes} bytes of the model: {os.strerror(ctypes.get_errno())}")


def map_shared(fd: int, nbytes: int, offset: int) -> Region:
    """Map memory that a kernel object shares with us (the rings of io_uring, for instance), for reading and writing."""
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address in (None, _FAILED):
        raise NativeError(f"cannot map {nbytes} bytes that the kernel shares: {os.strerror(ctypes.get_errno())}")
    return Region(int(address), nbytes)


def allow_reading(address: int, nbytes: int) -> None:
    """Make a page-aligned range readable; the caller knows that it is still his."""
    if _libc.mprotect(address, nbytes, mmap.PROT_READ) != 0:
        raise NativeError(f"cannot make {nbytes} bytes readable: {os.strerror(ctypes.get_errno())}")


def read_ahead(address: int, nbytes: int, *, allowed: bool) -> None:
    """Whether a fault in a file mapping may read pages around it as well; only advice, so a refusal is no error."""
    _libc.madvise(address, nbytes, _MADV_NORMAL if allowed else _MADV_RANDOM)


def fill(address: int, byte: int, nbytes: int) -> None:
    """Set every byte of a range."""
    ctypes.memset(address, byte, nbytes)


def view(address: int, nbytes: int) -> memoryview:
    """The bytes of a range, without a copy; the caller keeps the memory alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def file_mappings(inode: int, path: str) -> set[int]:
    """Addresses at which offset 0 of a file is, or would be, mapped in this process; empty where /proc is missing.

    The kernel's inode number decides; the path only where a layered file system reports another one.
    """
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return set()
    found = set()
    for line in text.splitlines():
        span, _, offset, _, number, *name = line.split(None, 5)
        if int(number) == inode or (name and name[0] == path):
            found.add(int(span.partition("-")[0], 16) - int(offset, 16))
    return found


def count_mappings() -> int:
    """Mappings of this process, to be held against ``vm.max_map_count``; 0 where /proc is not to be had."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0
