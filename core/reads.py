"""What crosses the seam between core and fetchers: batches of reads, and what moves them from files to memory.

Plugins take these from :mod:`bmoe.contracts`, which has all that crosses the seam.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class ReadBatch:
    """Reads of one routing, ordered by projection. Every column is a 1-D int64 array of the same length n.

    ``address`` where the bytes go, ``length`` how many are asked for, ``required`` how many must arrive at least (a
    page-rounded read may end at the end of the file), ``offset`` and ``shard`` where they come from, ``stage`` the
    projection index that they complete. Address, length and offset are multiples of the page size.
    """

    address: NDArray[np.int64]
    length: NDArray[np.int64]
    required: NDArray[np.int64]
    offset: NDArray[np.int64]
    shard: NDArray[np.int64]
    stage: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.address)

    def row(self, index: int, /) -> Read:
        """One row, for messages and traces."""
        return Read(
            int(self.address[index]),
            int(self.length[index]),
            int(self.required[index]),
            int(self.offset[index]),
            int(self.shard[index]),
            int(self.stage[index]),
        )


class Read(NamedTuple):
    """One row of a :class:`ReadBatch`."""

    address: int
    length: int
    required: int
    offset: int
    shard: int
    stage: int


class Ticket(Protocol):
    """A submitted batch: ``nbytes`` asked for; opaque otherwise. A ticket that is dropped counts as cancelled."""

    nbytes: int


class Fetcher(Protocol):
    """Moves expert bytes from files to memory. At least 64 tickets may be out; all calls come from one thread.

    Reads are of two ranks. *Demanded* reads go in the order of their stages, first those that are waited for.
    *Ahead* reads, which may turn out useless, start only while the device has room, inside the calls below, and only a
    small bounded number of them is with the device: nothing demanded queues behind more than that.
    """

    direct: bool
    """Whether reads really bypass the page cache, as verified on the files themselves."""
    note: str
    """Why not, in words for a person; empty if it is as asked."""

    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Ticket:
        """Start reads, lower stages first, and return without waiting for them where the platform can.

        Some may be started only in later calls, those to ``wait`` and ``ready`` above all; ``wait(ticket, -1)`` waits
        for nothing and hands over what is demanded. Nothing of an interrupted ``submit`` is in flight.
        """

    def wait(self, ticket: Ticket, upto: int, /) -> int:
        """Wait until every read of a stage <= ``upto`` arrived; return the bytes of the batch read so far.

        While it waits, a bounded number of reads is in flight, in the order of their stages; before it returns, all
        that is left of the demanded reads is handed to the system, then ahead reads up to their bound. Waiting for an
        ahead ticket makes it demanded.

        Raises :class:`~bmoe.errors.ReadError` naming file, offset, length and errno if a read of this ticket failed,
        of any stage; then no read *of this ticket* is in flight any more, and other tickets are not affected. An
        interrupt ends this ticket in the same way.
        """

    def ready(self, ticket: Ticket, upto: int, /) -> bool:
        """Whether ``wait`` would return or raise without waiting. Never waits; starts what there is room for."""

    def cancel(self, ticket: Ticket, /) -> None:
        """Never read what was not started, and wait for what is in flight. May be called twice, or when all arrived.

        Raises nothing because of a read. ``ready`` then says whether a stage is complete all the same, and ``wait``
        returns what was read.
        """

    def close(self) -> None:
        """Wait for what is in flight and release files, threads and kernel objects. May be called twice."""
