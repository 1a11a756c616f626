"""userfaultfd by system call: whether this process may have one. Nothing in bmoe waits on page faults.

Numbers and structures: Linux ``include/uapi/linux/userfaultfd.h`` and the syscall tables of x86-64 and aarch64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

_NUMBERS = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1  # Linux 5.11; what a process without privileges is granted
_API, _UFFDIO_API = 0xAA, 0xC018AA3F

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def missing() -> str:
    """Why userfaultfd cannot be used by this process, in one sentence, or ""."""
    if not sys.platform.startswith("linux"):
        return f"userfaultfd is Linux only, this is {sys.platform}"
    number = _NUMBERS.get(platform.machine())
    if number is None:
        return f"userfaultfd was not tried on {platform.machine()}"
    flags = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    fd = -1
    for mode in (_USER_MODE_ONLY, 0):
        fd = int(_libc.syscall(ctypes.c_long(number), ctypes.c_int(flags | mode)))
        if fd >= 0 or ctypes.get_errno() != errno.EINVAL:  # EINVAL: a kernel that does not know the mode
            break
    if fd < 0:
        return _refusal(ctypes.get_errno())
    try:
        handshake = (ctypes.c_uint64 * 3)(_API, 0, 0)  # struct uffdio_api
        if _libc.ioctl(fd, ctypes.c_ulong(_UFFDIO_API), handshake) != 0:
            return f"userfaultfd was granted and refuses its interface: {os.strerror(ctypes.get_errno())}"
    finally:
        os.close(fd)
    return ""


def _refusal(code: int) -> str:
    if code == errno.EPERM:
        return "userfaultfd is forbidden here, by vm.unprivileged_userfaultfd or by the sandbox (seccomp)"
    if code == errno.ENOSYS:
        return f"this kernel has no userfaultfd (Linux {platform.release()}), or the sandbox hides it (seccomp)"
    return f"userfaultfd refused: {os.strerror(code)}"
