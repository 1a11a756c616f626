"""What memory this process may have: free, limited by groups, locked, mapped, overcommitted, swapped, in huge pages."""

from __future__ import annotations

import re
from pathlib import Path

from bmoe.doctor.findings import Check, Finding, Sources, fields_of, note, number_of, ok, problem, size, text_of
from bmoe.machine import control_groups, read_machine

_LEAST, _LITTLE = 160 << 20, 1 << 30
"""Bytes: below the first not even the demo runs (its peak is some 90 MiB), the second is tight."""
_MAPS = 65530  # the kernel's own default
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number of this order
_LOCKED = 64 << 20
_CAP_IPC_LOCK = 14  # include/uapi/linux/capability.h

FREE = "end other programs, or raise the limit that is named under control groups"
LITTLE = "end other programs before a run; the automatic cache budget takes what is left, and a small cache reads more"
UNTOLD = "set cache.budget_mb to a number: without that figure there is no automatic budget"
GROUP = "raise the group's memory limit (docker --memory=, systemd MemoryMax= and MemoryHigh=) for a larger cache"
GROUP_KILLS = (
    "the group has ended processes for lack of memory: lower cache.budget_mb, or raise the group's memory limit"
)
LOCK = 'raise it (ulimit -l, systemd LimitMEMLOCK=) if you want dense.placement = "locked"; nothing else needs it'
MAPS = "raise it (sysctl vm.max_map_count=262144): with few mappings the cache moves pages by slower ways"
COMMIT = "sysctl vm.overcommit_memory=0: in mode 2 every reservation counts, also of memory that is never used"
SWAPPED = "end other programs or lower cache.budget_mb: a cache that is swapped out is read twice"
NO_SWAP = "lower cache.budget_mb if a run is ended by the kernel: without swap nothing softens a lack of memory"
HUGE = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: memory to read into costs fewer faults then"
ADDRESSES = "raise it (ulimit -v unlimited): the address space of the whole model is reserved, whatever the cache holds"


def memory(sources: Sources) -> Finding:
    """Memory that is free for a cache, control groups included."""
    available = read_machine(sources.root).available_bytes
    total = fields_of(sources.root / "proc/meminfo").get("MemTotal")
    if available is None:
        return note("the system does not say how much is free (/proc/meminfo)", UNTOLD)
    of = f" of {size(total << 10)}" if total else ""
    shown = f"{size(available)} free{of}"
    values = {"available_bytes": available, "memory_bytes": total << 10 if total else None}
    if available < _LEAST:
        return problem(shown, FREE, **values)
    return note(shown, LITTLE, **values) if available < _LITTLE else ok(shown, **values)


def groups(sources: Sources) -> Finding:
    """Limits that control groups set on memory, and whether they have ended processes."""
    total = fields_of(sources.root / "proc/meminfo").get("MemTotal")
    limits: dict[str, int] = {}
    killed = 0
    for group in control_groups(sources.root):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limit = number_of(group / name)
            if limit is not None and limit < min(_UNLIMITED, total << 10 if total else _UNLIMITED):
                limits[name] = min(limit, limits.get(name, limit))
        for name in ("memory.events", "memory.oom_control"):
            killed = max(killed, fields_of(group / name).get("oom_kill", 0))
    version = "2" if any((group / "cgroup.controllers").exists() for group in control_groups(sources.root)) else "1"
    if not limits:
        return ok("no limit on memory", limits={}, oom_kills=killed)
    shown = f"version {version}: " + ", ".join(f"{name} {size(limit)}" for name, limit in limits.items())
    if killed:
        return note(f"{shown}, {killed} processes ended", GROUP_KILLS, limits=limits, oom_kills=killed)
    return note(shown, GROUP, limits=limits, oom_kills=0)


def locked(sources: Sources) -> Finding:
    """How much memory this process may lock."""
    status = text_of(sources.root / "proc/self/status")
    mask = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    if mask and int(mask[1], 16) >> _CAP_IPC_LOCK & 1:
        return ok("no limit (CAP_IPC_LOCK)")
    limit = limit_of(sources.root, "Max locked memory", "RLIMIT_MEMLOCK")
    if limit is None:
        return ok("no limit")
    return (ok if limit >= _LOCKED else note_lock)(f"at most {size(limit)}", limit_bytes=limit)


def note_lock(measured: str, **values: int) -> Finding:
    """The note about a low limit."""
    return note(measured, LOCK, **values)


def limit_of(root: Path, row: str, name: str) -> int | None:
    """The soft limit in bytes by /proc/self/limits, else as the system says it; None = none."""
    found = re.search(rf"^{row}\s+(\S+)", text_of(root / "proc/self/limits"), re.MULTILINE)
    if found:
        return int(found[1]) if found[1].isdecimal() else None
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(getattr(resource, name))[0]
    return None if limit == resource.RLIM_INFINITY else limit


def addresses(sources: Sources) -> Finding:
    """The limit of address space."""
    limit = limit_of(sources.root, "Max address space", "RLIMIT_AS")
    return ok("no limit") if limit is None else note(f"at most {size(limit)}", ADDRESSES, limit_bytes=limit)


def mappings(sources: Sources) -> Finding:
    """vm.max_map_count."""
    limit = read_machine(sources.root).max_map_count
    if limit is None:
        return ok("the system names no limit")
    shown = f"vm.max_map_count = {limit}"
    return ok(shown, limit=limit) if limit >= _MAPS else note(shown, MAPS, limit=limit)


def overcommit(sources: Sources) -> Finding:
    """vm.overcommit_memory, and in mode 2 what may still be reserved."""
    mode = number_of(sources.root / "proc/sys/vm/overcommit_memory")
    if mode is None:
        return ok("the system does not say")
    if mode != 2:
        return ok(f"vm.overcommit_memory = {mode}", mode=mode)
    info = fields_of(sources.root / "proc/meminfo")
    left = max(0, info.get("CommitLimit", 0) - info.get("Committed_AS", 0)) << 10
    return note(f"vm.overcommit_memory = 2, {size(left)} may be reserved", COMMIT, mode=mode, left_bytes=left)


def swap(sources: Sources) -> Finding:
    """Swap, and how much of it is in use."""
    info = fields_of(sources.root / "proc/meminfo")
    if "SwapTotal" not in info:
        return ok("the system does not say")
    total, used = info["SwapTotal"] << 10, info["SwapTotal"] - info.get("SwapFree", 0) << 10
    values = {"swap_bytes": total, "used_bytes": used}
    if not total:
        little = info.get("MemAvailable", 0) << 10 < _LITTLE
        return note("none", NO_SWAP, **values) if little else ok("none", **values)
    compressed = " (compressed memory)" if "zram" in text_of(sources.root / "proc/swaps") else ""
    shown = f"{size(used)} of {size(total)} used{compressed}"
    return note(shown, SWAPPED, **values) if used > total // 4 else ok(shown, **values)


def huge_pages(sources: Sources) -> Finding:
    """Transparent huge pages."""
    choices = text_of(sources.root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", choices)
    if not chosen:
        return ok("the kernel has none, or does not say")
    return note("never", HUGE, mode="never") if chosen[1] == "never" else ok(chosen[1], mode=chosen[1])


CHECKS = (
    Check("memory", "how much memory is free", memory, (FREE, LITTLE, UNTOLD), needed=True),
    Check("control groups", "do control groups limit memory", groups, (GROUP, GROUP_KILLS)),
    Check("locked memory", "how much may be locked", locked, (LOCK,)),
    Check("address space", "is the address space limited", addresses, (ADDRESSES,)),
    Check("mappings", "how many mappings may a process have", mappings, (MAPS,)),
    Check("overcommit", "is memory counted when it is reserved", overcommit, (COMMIT,)),
    Check("swap", "is memory swapped out", swap, (SWAPPED, NO_SWAP)),
    Check("huge pages", "are there transparent huge pages", huge_pages, (HUGE,)),
)
