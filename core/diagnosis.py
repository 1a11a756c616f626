"""Why a run was slow: the drive, the budget, the processor or the memory, from what the run measured.

A streamed model that fails to be fast looks the same whatever the reason is. Each of the four leaves a sign of its own:
reads that take longer than a modest drive needs, entries that come back soon after they went, threads that could
run and have no processor, memory that is read back after the system took it. The bounds below are those of
sums over a run's decodes; a sign counts only if it costs a good part of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bmoe.records import Cause

LEAST_TOKENS, LEAST_S = 8, 0.05
"""Below this nothing is concluded."""
SHARE = 0.2
"""Of the time of all decodes: what reading must cost before it is a reason."""
ENTRY_S, BYTES_PER_S = 0.5e-3, 250e6
"""A modest drive: seconds for each entry and bytes a second. Cards and spinning disks need longer, drives with flash of
the last ten years do not."""
REREAD_SHARE = 0.15
"""Of the lookups: entries that had been in memory and were given up."""
DELAYED_SHARE, DELAYED_S = 0.1, 0.03
"""Of the time, and in all: how long a thread that could have run waited for a processor, which something else had."""
FAULTS_PER_S = 100.0
"""Major faults a second of decoding: each one is a read of memory that had been there."""
MIB = 1 << 20


@dataclass(slots=True)
class Signs:
    """Sums over the decodes of a run, the prompt's left out. None = unmeasured. ``budget_bytes`` 0: the cache is off.

    ``delayed_s`` is how long the thread of the process that had to wait most for a processor did so, ``others_s`` how
    long processors were not its own though they were not idle: the lanes of a fetcher also wait for each other.
    """

    tokens: int = 0
    decode_s: float = 0.0
    read_wait_s: float | None = None
    manage_s: float | None = None
    delayed_s: float | None = None
    others_s: float | None = None
    lookups: int = 0
    hits: int = 0
    rereads: int = 0
    read_bytes: int = 0
    budget_bytes: int = 0
    majflt: int | None = None
    swapped_bytes: int | None = None

    @property
    def misses(self) -> int:
        """Entries that had to be read."""
        return self.lookups - self.hits


def diagnose(signs: Signs) -> tuple[Cause, ...] | None:
    """What made it slow, in the order of the time that it cost; empty if nothing did, None if too little was seen."""
    if signs.tokens < LEAST_TOKENS or signs.decode_s < LEAST_S:
        return None
    found = [cause for question in (_drive, _budget, _processor, _memory) for cause in question(signs)]
    return tuple(sorted(found, key=lambda cause: -cause.share))


def _drive(s: Signs) -> Iterator[Cause]:
    # whoever waits for a processor seems to wait for the drive
    wait = max(0.0, (s.read_wait_s or 0.0) - (s.delayed_s or 0.0))
    modest = s.misses * ENTRY_S + s.read_bytes / BYTES_PER_S
    if wait <= max(SHARE * s.decode_s, modest):
        return
    seen = f"{s.read_bytes / wait / 1e6:.0f} MB/s while waiting, {1e3 * wait / max(1, s.misses):.1f} ms an entry"
    yield Cause("drive", wait / s.decode_s, seen, "move the model to a faster drive; `bmoe doctor` measures this one")


def _budget(s: Signs) -> Iterator[Cause]:
    reading = (s.read_wait_s or 0.0) + (s.manage_s or 0.0) - (s.delayed_s or 0.0)
    if not s.lookups or reading <= SHARE * s.decode_s:
        return
    if not s.budget_bytes:
        seen = f"the cache is off, {s.read_bytes / s.tokens / MIB:.1f} MiB read for each token"
        yield Cause("budget", reading / s.decode_s, seen, "give cache.budget_mb what memory there is")
    elif s.rereads > REREAD_SHARE * s.lookups:
        held = f"a cache of {s.budget_bytes / MIB:.0f} MiB"
        seen = f"{held} gave up what came back: {s.rereads / s.lookups:.0%} of all lookups"
        yield Cause("budget", reading / s.decode_s, seen, "raise cache.budget_mb, or take a smaller quantisation")


def _processor(s: Signs) -> Iterator[Cause]:
    delayed = s.delayed_s or 0.0
    if s.others_s is not None:
        delayed = min(delayed, s.others_s)
    share = delayed / s.decode_s
    if share < DELAYED_SHARE or delayed < DELAYED_S:
        return
    seen = f"other work had the processor {min(share, 1.0):.0%} of the time that a thread of bmoe could have run"
    remedy = "end the other work, or set model.threads lower: threads wait for each other"
    yield Cause("processor", min(share, 1.0), seen, remedy)


def _memory(s: Signs) -> Iterator[Cause]:
    faults, swapped = (s.majflt or 0) / s.decode_s, s.swapped_bytes or 0
    if faults < FAULTS_PER_S:
        return
    more = f", {swapped / MIB:.0f} MiB swapped out" if swapped > MIB else ""
    remedy = 'lower cache.budget_mb, close other programs, or set dense.placement to "locked"'
    yield Cause("memory", min(1.0, faults * 1e-4), f"{faults:.0f} times a second memory was read back{more}", remedy)
