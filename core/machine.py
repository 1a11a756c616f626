"""What this machine grants: processors, page size, and the memory that is free for us, control groups included."""

from __future__ import annotations

import math
import mmap
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """``cpus`` usable by this process, ``page_bytes``, ``available_bytes`` (None = unknown here), and names.

    ``max_map_count`` is the kernel's limit of mappings per process, None where there is none.
    """

    cpus: int
    page_bytes: int
    available_bytes: int | None
    system: str
    release: str
    arch: str
    max_map_count: int | None


def read_machine(root: Path = Path("/")) -> Machine:
    """Look at this machine now. ``root`` is where /proc and /sys are found."""
    groups = list(control_groups(root))
    return Machine(
        cpus=_cpus(groups),
        page_bytes=mmap.PAGESIZE,
        available_bytes=_available(root, groups),
        system=platform.system(),
        release=platform.release(),
        arch=platform.machine(),
        max_map_count=_number(root / "proc/sys/vm/max_map_count"),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _field(path: Path, key: str) -> int | None:
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[0] == key and words[1].isdecimal():
            return int(words[1])
    return None


def control_groups(root: Path = Path("/")) -> Iterator[Path]:
    """The folders of this process's control groups, innermost first; a limit may be set on any of them.

    Of version 1 those that limit memory or processors; of version 2 all, also where it is mounted beside version 1.
    """
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, inside = ([*line.split(":", 2), "", ""])[:3]
        if controllers and not {"memory", "cpu"} & set(controllers.split(",")):
            continue
        unified = mount / "unified" if (mount / "unified").is_dir() else mount
        top = mount / controllers if controllers else unified
        parts = [part for part in inside.split("/") if part and part != ".."]
        for length in range(len(parts), -1, -1):
            folder = top.joinpath(*parts[:length])
            # In a container the path may be the host's, which is not visible here: its root is this group then.
            if folder.is_dir():
                yield folder


def _cpus(groups: list[Path]) -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    for group in groups:
        quota, period = ([*_text(group / "cpu.max").split(), "", ""])[:2]
        if not quota:
            quota, period = (_text(group / f"cpu.cfs_{part}_us").strip() for part in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            cpus = min(cpus, max(1, math.ceil(int(quota) / int(period))))
    return cpus


def _available(root: Path, groups: list[Path]) -> int | None:
    kib = _field(root / "proc/meminfo", "MemAvailable")
    if kib is None:
        return None
    return min([kib * 1024, *(free for group in groups if (free := _free_in(group)) is not None)])


def _free_in(group: Path) -> int | None:
    """What a control group still grants: its limit less what is used, where file cache that nobody uses is free."""
    stat = group / "memory.stat"
    used = _number(group / "memory.current")
    if used is not None:
        # above memory.high a group is not refused memory, but slowed down until it gives some back
        limits, idle = [_number(group / "memory.max"), _number(group / "memory.high")], _field(stat, "inactive_file")
    else:
        used = _number(group / "memory.usage_in_bytes")
        # the second is the least of those above it too, which a container may not show
        limits = [_number(group / "memory.limit_in_bytes"), _field(stat, "hierarchical_memory_limit")]
        idle = _field(stat, "total_inactive_file")
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known) - used + (idle or 0)) if known and used is not None else None
