"""A file to measure a drive with, made in a folder and gone afterwards.

It has no name as soon as it is open, where the system allows that: nothing is left, whatever ends us.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Iterator

from bmoe.errors import NativeError

_CHUNK = 4 << 20
_WRITE_S = 5.0
_LEAST = 1 << 20
_KEPT_FREE = 64 << 20


@contextlib.contextmanager
def data_file(path: str, nbytes: int) -> Iterator[tuple[str, bool]]:
    """The file to read, and whether it was made: ``path``, or in a folder one of ``nbytes``, fewer on a full drive.

    Raises NativeError saying why there is none: it begins with "full" or "not writable".
    """
    if not os.path.isdir(path):
        yield path, False
        return
    fd, name = _create(path)
    try:
        _write(fd, path, nbytes)
        yield name or f"/proc/self/fd/{fd}", True
    finally:
        os.close(fd)
        if name:
            with contextlib.suppress(OSError):
                os.unlink(name)


def _create(folder: str) -> tuple[int, str]:
    """A file in a folder, and its name; "" if it has none any more."""
    try:
        fd, name = tempfile.mkstemp(prefix=".bmoe-doctor-", suffix=".tmp", dir=folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NativeError(f"full: {folder}: {error.strerror}") from error
        raise NativeError(f"not writable: {folder}: {error.strerror}") from error
    if not os.path.exists(f"/proc/self/fd/{fd}"):
        return fd, name
    os.unlink(name)
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
    except OSError as error:  # a file system that forgets what has no name
        os.close(fd)
        raise NativeError(
            f"not writable: {folder}: a file without a name cannot be opened: {error.strerror}"
        ) from error
    return fd, ""


def _write(fd: int, folder: str, nbytes: int) -> None:
    """Fill the file, never to the last of the drive nor for long; bytes that no file system makes smaller."""
    free = os.fstatvfs(fd)
    room = min(nbytes, (free.f_bavail * free.f_frsize - _KEPT_FREE) // 2)
    until = time.monotonic() + _WRITE_S
    written = 0
    try:
        while written < room and time.monotonic() < until:
            written += os.write(fd, os.urandom(min(_CHUNK, room - written)))
            os.fsync(fd)
    except OSError as error:
        if not written:
            raise NativeError(f"full: {folder}: {error.strerror}") from error
    if written < _LEAST:
        raise NativeError(f"full: {folder}: only {max(0, free.f_bavail * free.f_frsize)} bytes are free")
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
