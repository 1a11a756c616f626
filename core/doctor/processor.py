"""The processor: how many cores there are for us, is somebody else on them, how many threads pay, does it slow down."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from bmoe.doctor.findings import Check, Finding, Sources, fields_of, note, number_of, ok, text_of
from bmoe.machine import control_groups, read_machine

_WATCH_S = 0.5
_BUSY = 0.25
_LOST = 0.15
_PAYS = 2.0
"""How much faster fewer threads must be: on idle cores so small a model loses a tenth by one more."""
_SLOWER = 0.9
_HOT = 85.0
_GRANTED = 0.85

QUOTA = "set model.threads to the whole processors of the quota, or raise it (docker --cpus=, systemd CPUQuota=)"
MIXED = (
    "set model.threads to the number of fast cores: llama.cpp's threads wait for the slowest one after every operation"
)
SHARE = (
    "end what else computes, or set model.threads to the number that is named here: threads spin while one has no core"
)
THREADS = "set model.threads to the number that is named here (--set model.threads=N)"
UNMEASURED = "run bmoe doctor without --quick to measure it"
COOL = "cool the device, set fewer model.threads, and expect of a long run the speed of the end, not of the beginning"
THROTTLED = "raise the group's processor quota (docker --cpus=, systemd CPUQuota=), or set fewer model.threads"
ALONE = "end what else computes and run bmoe doctor again"
NO_TRIAL = "see the lines about packages and structures; without them nothing can be computed"


def cores(sources: Sources) -> Finding:
    """Processors that this process may use, and whether some are slower than others."""
    usable = read_machine(sources.root).cpus
    speeds = _speeds(sources.root)
    quota = _quota(sources.root)
    values: dict[str, Any] = {"usable": usable, "quota": quota, "fast": None}
    if quota is not None and quota < (len(speeds) or os.cpu_count() or 1):
        return note(f"{usable} usable, by a quota of {quota:g} processors", QUOTA, **values)
    # the fastest core of a phone is often alone: what is nearly as fast counts with it
    fast = sum(speed >= 0.7 * max(speeds) for speed in speeds)
    values["fast"] = fast or None
    if 0 < fast < len(speeds):
        return note(f"{usable} usable, {fast} of {len(speeds)} are fast ones", MIXED, **values)
    return ok(f"{usable} usable", **values)


def _speeds(root: Path) -> list[int]:
    """A figure of speed for each core, by which they compare; empty where the system has none."""
    folder = root / "sys/devices/system/cpu"
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        found = [number_of(place / name) for place in sorted(folder.glob("cpu[0-9]*"))]
        if known := [speed for speed in found if speed]:
            return known
    return []


def _quota(root: Path) -> float | None:
    """Processors that control groups grant, in parts too; None = no limit."""
    least: float | None = None
    for group in control_groups(root):
        words = text_of(group / "cpu.max").split() or [
            text_of(group / f"cpu.cfs_{part}_us") for part in ("quota", "period")
        ]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            share = int(words[0]) / int(words[1])
            least = share if least is None else min(least, share)
    return least


def sharing(sources: Sources) -> Finding:
    """Whether other processes use the cores, by their time, and by two threads that meet again and again."""
    usable = read_machine(sources.root).cpus
    others = _others(sources.root, usable)
    load = re.match(r"\d+\.\d+", text_of(sources.root / "proc/loadavg"))
    answer = sources.ask("trials:probe_barrier", (1.0,), 8) if usable > 1 else None
    lost = answer.told[-1]["lost"] if answer and answer.told else None
    words = []
    if others is not None:
        words.append(f"others use {others:.1f} of {usable} cores")
    if load:
        words.append(f"load {load[0]}")
    if lost is not None:
        words.append(f"two threads that meet lose {lost:.0%} of the time")
    elif answer is not None:
        words.append(f"meeting threads: {answer.failure or 'nothing told'}")
    values = {"others": others, "load": float(load[0]) if load else None, "lost": lost}
    if others is None and lost is None:
        return ok(", ".join(words) or "one core, and the system does not say who uses it", **values)
    shared = (others or 0) > _BUSY * usable or (others or 0) > 0.7 or (lost or 0) > _LOST
    sources.known["shared"] = shared
    if shared:
        free = max(1, min(usable - 1, int(usable - (others or 0) + 0.3)))
        return note(f"{', '.join(words)}: {threads_(free)}", SHARE, **values, threads=free)
    return ok(", ".join(words), **values)


def threads_(count: int) -> str:
    """A number of threads in words."""
    return f"{count} thread" if count == 1 else f"{count} threads"


def _others(root: Path, usable: int) -> float | None:
    """Cores of ours that other processes used for half a second; None where the system does not say.

    In a container the figures are the whole machine's: what fits beside our cores is not counted.
    """
    before, own = _ticks(root), time.process_time()
    began = time.perf_counter()
    if before is None:
        return None
    time.sleep(_WATCH_S)
    after, seconds = _ticks(root), time.perf_counter() - began
    if after is None:
        return None
    used = (after - before) / os.sysconf("SC_CLK_TCK") - (time.process_time() - own)
    online = len(re.findall(r"^cpu\d", text_of(root / "proc/stat"), re.MULTILINE))
    return max(0.0, used / seconds - max(0, online - usable))


def _ticks(root: Path) -> int | None:
    """Clock ticks of all cores that were not idle, without those that a hypervisor gave to others."""
    words = text_of(root / "proc/stat").partition("\n")[0].split()
    if len(words) < 8 or words[0] != "cpu" or not all(word.isdecimal() for word in words[1:8]):
        return None
    user, nice, system, _, _, irq, softirq = map(int, words[1:8])
    return user + nice + system + irq + softirq


def threads(sources: Sources) -> Finding:
    """How many threads are fastest, with the model that comes with bmoe, in memory."""
    usable = read_machine(sources.root).cpus
    if sources.quick:
        return note("skipped with --quick", UNMEASURED)
    counts = sorted({1, max(1, usable // 2), max(1, usable - 1), usable})
    answer = sources.ask("trials:probe_threads", (counts,), 60)
    if not answer.told:
        return note(answer.failure or "nothing told", NO_TRIAL)
    speeds = {int(count): float(speed) for count, speed in answer.told[-1].items()}
    shown = ", ".join(f"{threads_(count)} {speed:.0f} tok/s" for count, speed in sorted(speeds.items()))
    best = max(speeds, key=lambda count: speeds[count])
    values = {"tok_per_s": {str(count): speed for count, speed in speeds.items()}, "best": best}
    # on idle cores fewer threads are faster only because this model is small, which says nothing of a large one
    if sources.known.get("shared", True) and speeds[best] > _PAYS * speeds[max(speeds)]:
        return note(f"{shown}: {threads_(best)}", THREADS, **values)
    return ok(shown, **values)


def throttling(sources: Sources) -> Finding:
    """Whether the processor is slower at the end of 20 seconds of work than at their beginning."""
    if sources.quick:
        return note("skipped with --quick", UNMEASURED)
    usable = read_machine(sources.root).cpus
    before, halted = temperature(sources.root), _halts(sources.root)
    alone = (5.0, 15.0) if usable > 1 else (20.0, 0.0)
    answer = sources.ask("trials:probe_heat", (usable, *alone), 45)
    after, halts = temperature(sources.root), _halts(sources.root) - halted
    if answer.failure or not answer.told:
        return note(answer.failure or "nothing told", NO_TRIAL)
    words, kept = [], 1.0
    granted = min(phase["granted"] for phase in answer.told)
    for phase in answer.told:
        share = phase["last"] / phase["first"]
        kept = min(kept, share)
        words.append(f"{threads_(phase['threads'])} {share - 1:+.0%} after {phase['seconds']:.0f} s")
    warm = f"{before:.0f} to {after:.0f} °C" if before is not None and after is not None else "temperature not shown"
    shown = f"{', '.join(words)}; {warm}"
    values = {"phases": answer.told, "before_c": before, "after_c": after, "quota_halts": halts}
    if halts > 0:
        return note(f"{shown}; the quota halted the group {halts} times", THROTTLED, **values)
    if granted < _GRANTED:
        return note(
            f"{shown}; others took {1 - granted:.0%} of the cores meanwhile, so this tells little", ALONE, **values
        )
    if kept < _SLOWER or (after or 0) >= _HOT:
        return note(shown, COOL, **values)
    return ok(shown, **values)


def _halts(root: Path) -> int:
    """How often the quota of a control group has halted its processes."""
    return max((fields_of(group / "cpu.stat").get("nr_throttled", 0) for group in control_groups(root)), default=0)


def temperature(root: Path) -> float | None:
    """The highest temperature that a sensor of processors or board shows, in °C; None where none is shown."""
    found = [number_of(place) for place in (root / "sys/class/thermal").glob("thermal_zone*/temp")]
    found += [number_of(place) for place in (root / "sys/class/hwmon").glob("hwmon*/temp*_input")]
    degrees = [each / 1000 for each in found if each is not None and 0 < each < 150_000]
    return max(degrees, default=None)


CHECKS = (
    Check("cores", "how many cores may be used", cores, (QUOTA, MIXED)),
    Check("sharing", "does something else use the cores", sharing, (SHARE,), seconds=15),
    Check("threads", "how many threads are fastest", threads, (THREADS, UNMEASURED, NO_TRIAL), seconds=70),
    Check("throttling", "does it slow down", throttling, (COOL, THROTTLED, ALONE, UNMEASURED, NO_TRIAL), seconds=60),
)
