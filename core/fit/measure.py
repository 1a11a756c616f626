"""What this machine does, as costs: products, what else a token takes, and the drive; with how many threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from bmoe.contracts import ArchRow
from bmoe.fit import drive as drives
from bmoe.fit import overhead as overheads
from bmoe.fit import processor as processors
from bmoe.fit.estimate import Costs
from bmoe.plan import Plan

ReadDrive = Callable[[], drives.Drive | None]
"""Measures the drive; None if nothing is read from it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement, or the mean of several."""

    processor: processors.Processor
    overhead: overheads.Overhead
    drive: drives.Drive | None

    @property
    def costs(self) -> Costs:
        """As an estimate takes them."""
        costs = Costs(self.processor.compute_s, self.overhead, self.processor.share)
        drive = self.drive
        if drive is None:
            return costs
        return replace(costs, first_s=drive.first_s, next_s=drive.next_s, slice_bytes=drive.slice_bytes)

    def mean(self, other: Measured) -> Measured:
        """Of two measurements at different times: what others use too is now faster and now slower."""
        drive = self.drive.mean(other.drive) if self.drive and other.drive else self.drive
        return Measured(self.processor.mean(other.processor), self.overhead.mean(other.overhead), drive)


def measure(plan: Plan, rows: Mapping[str, ArchRow], threads: int, read: ReadDrive) -> Measured:
    """Measure with ``threads``: a second, or three where experts are streamed."""
    return Measured(
        processors.measure(plan.facts, threads),
        overheads.measure(rows, threads, streaming=plan.streaming),
        read(),
    )


@contextmanager
def reader(plan: Plan, place: str | None, *, remote: bool) -> Iterator[ReadDrive]:
    """What measures the drive: that of the model's own files, or of ``place``, which a ``remote`` model lies in later.

    A file that is made for it in ``place`` stays until the end. Raises what making it raises.
    """
    if not plan.streaming:
        yield lambda: None
    elif not (remote or place):
        yield lambda: drives.measure(plan.facts, plan.fetch, plan.facts_for_build())
    else:
        named = place or "."
        with drives.sample(named) as path:
            # the file itself is gone afterwards, and may never have had a name
            yield lambda: replace(drives.measure(plan.facts, plan.fetch, plan.facts_for_build(), path), path=named)
