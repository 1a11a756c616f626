"""What this process costs between two tokens: page faults, memory and the time that the machine stalled on I/O."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class ProcessSample(NamedTuple):
    """Process counters: faults, involuntary context switches and stall time since the last sample, sizes as of now.

    None = unmeasured.
    ``rss_bytes`` is the sum of its own memory (``anon``), of pages of mapped files, and of shared memory.
    """

    majflt: int | None
    minflt: int | None
    nivcsw: int | None
    rss_bytes: int | None
    rss_anon_bytes: int | None
    rss_file_bytes: int | None
    rss_shmem_bytes: int | None
    swap_bytes: int | None
    psi_some_us: int | None


class ProcessCounters:
    """Reads the counters of this process on descriptors that stay open: about 10 µs a sample.

    RSS and swap come from ``/proc/self/status``, faults from ``getrusage``, stall time from the machine-wide
    ``/proc/pressure/io`` (``memory`` where there is no ``io``).
    """

    def __init__(self, proc: str = "/proc", groups: Sequence[Path] = ()) -> None:
        """``groups`` are the folders of this process's control groups, which may have a quota of the processors."""
        self._status = _open(f"{proc}/self/status")
        self._tasks, self._all = f"{proc}/self/task", f"{proc}/stat"
        self._quotas = [folder / "cpu.stat" for folder in groups]
        source = pressure_source(proc)
        self._pressure = None if source is None else _open(f"{proc}/pressure/{source}")
        self._faults: tuple[int, int, int] | None = None
        self._stalled: int | None = None
        self.sample()

    def sample(self) -> ProcessSample:
        """Read the counters; all but sizes count from the previous sample (or from the construction)."""
        major = minor = switches = stall = None
        faults, stalled = _faults(), _stalled_us(self._pressure)
        if faults is not None and self._faults is not None:
            major, minor, switches = (now - before for now, before in zip(faults, self._faults, strict=True))
        if stalled is not None and self._stalled is not None:
            stall = stalled - self._stalled
        self._faults, self._stalled = faults, stalled
        status = _pread(self._status)
        kinds = (b"VmRSS:", b"RssAnon:", b"RssFile:", b"RssShmem:", b"VmSwap:")
        rss, anon, mapped, shared, swap = (_kib(status, key) for key in kinds)
        return ProcessSample(major, minor, switches, rss, anon, mapped, shared, swap, stall)

    def forget_peak(self) -> None:
        """Let :meth:`peak_rss_bytes` start from what is resident now, where the kernel allows it.

        An open may map a whole file out of the page cache for a moment; that peak says nothing about running.
        """
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak_rss_bytes(self) -> int | None:
        """The largest resident size of this process so far (``VmHWM``: ``ru_maxrss`` would include the parent's)."""
        return _kib(_pread(self._status), b"VmHWM:")

    def delays_s(self) -> dict[int, float]:
        """Seconds that each thread of this process could have run and had no processor, since it began, by its id.

        From ``/proc/self/task/*/schedstat``: about 20 µs for each of them. Empty where that cannot be read.
        """
        found: dict[int, float] = {}
        with contextlib.suppress(OSError):
            for thread in os.listdir(self._tasks):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    found[int(thread)] = int(Path(self._tasks, thread, "schedstat").read_bytes().split()[1]) / 1e9
        return found

    def others_s(self) -> float | None:
        """Seconds that this process did not have of all processors though they were not idle, since it was started.

        What others worked, a hypervisor took away, or the quota of a control group withheld: from the first line of
        ``/proc/stat`` and from ``cpu.stat``. None where that cannot be read.
        """
        with contextlib.suppress(OSError, ValueError, IndexError):
            ticks = [int(field) for field in Path(self._all).read_bytes().splitlines()[0].split()[1:9]]
            waiting = ticks[3] + ticks[4]  # idle, and idle while the drive reads
            worked = (sum(ticks) - waiting) / os.sysconf("SC_CLK_TCK") - time.process_time()
            return worked + max(map(_withheld_s, self._quotas), default=0.0)
        return None

    def close(self) -> None:
        """Close the descriptors; later samples are unmeasured. May be called twice."""
        for fd in (self._status, self._pressure):
            if fd is not None:
                os.close(fd)
        self._status = self._pressure = None


def _withheld_s(path: Path) -> float:
    """Seconds that a control group was stopped by its quota, of either version; 0 where that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
        return int(fields.get("throttled_usec", 0)) / 1e6 + int(fields.get("throttled_time", 0)) / 1e9
    return 0.0


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None


def _pread(fd: int | None) -> bytes:
    if fd is None:
        return b""
    try:
        return os.pread(fd, 8192, 0)
    except OSError:
        return b""


def _kib(status: bytes, key: bytes) -> int | None:
    start = status.find(b"\n" + key)
    if start < 0:
        return None
    return int(status[start + 1 + len(key) :].split(None, 1)[0]) * 1024


def pressure_source(proc: str = "/proc") -> str | None:
    """Which file of ``/proc/pressure`` counts stall time here: io, memory, or None."""
    # a kernel built with PSI but booted without it has the files and refuses to read them
    for name in ("io", "memory"):
        fd = _open(f"{proc}/pressure/{name}")
        readable = _stalled_us(fd) is not None
        if fd is not None:
            os.close(fd)
        if readable:
            return name
    return None


def _stalled_us(fd: int | None) -> int | None:
    some = _pread(fd).partition(b"\n")[0]
    total = some.rpartition(b"total=")[2] if some.startswith(b"some") else b""
    return int(total) if total.isdigit() else None


def _faults() -> tuple[int, int, int] | None:
    try:
        import resource
    except ImportError:
        return None
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt, usage.ru_minflt, usage.ru_nivcsw
