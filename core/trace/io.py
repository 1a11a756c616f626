"""The I/O trace of a run: a stand-in before the fetcher notes every read and passes each call on as it came.

Tickets are the fetcher's own inside a thin shell, so one that is dropped is dropped there too.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bmoe.contracts import BatchContext, Fetcher, ModelFacts, ReadBatch, Ticket
from bmoe.replay.route_trace import CODES
from bmoe.trace.output import TraceLines

VERSION = "io_trace v1"
COLUMNS = (
    "batch", "ahead", "layer", "bank", "projection", "expert", "experts", "shard", "offset", "bytes",
    "submit_s", "arrived_s", "waited_s", "state", "phase",
)  # fmt: skip
OUTSIDE = -1
"""The phase of what is read between decodes, as when a model is opened."""
ARRIVED, CANCELLED, FAILED = 0, 1, 2


@dataclass(slots=True)
class TracedTicket:
    """A ticket of the fetcher with its reads; ``done`` of them, in the order of stages, have their row."""

    inner: Ticket
    nbytes: int
    number: int
    ahead: bool
    phase: int
    submit_s: float
    reads: list[tuple[int, ...]] = field(default_factory=list)
    done: int = 0
    waited_s: float = 0.0


class TracedFetcher:
    """Calls ``inner`` in the same order with the same arguments, and writes a row once the fate of a read is known."""

    def __init__(self, inner: Fetcher, facts: ModelFacts, out: TraceLines, began: float) -> None:
        self._inner, self._out, self._began = inner, out, began
        self._places, self._ends = _Places(facts), [shard.nbytes for shard in facts.shards]
        self._number = self._rows = 0
        self.phase = OUTSIDE
        self.direct, self.note = inner.direct, inner.note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Ticket:
        """Pass on; what is submitted is noted before, since a fetcher may read at once."""
        now = time.perf_counter() - self._began
        rows = [column.tolist() for column in (reads.stage, reads.shard, reads.offset, reads.length)]  # one column each
        inner = self._inner.submit(reads, ahead=ahead)
        self._number += 1
        return TracedTicket(
            inner, inner.nbytes, self._number - 1, ahead, self.phase, now, list(zip(*rows, strict=True))
        )

    def wait(self, ticket: Ticket, upto: int, /) -> int:
        """Pass on, and note what has arrived and how long it was waited for."""
        assert isinstance(ticket, TracedTicket)
        began = time.perf_counter()
        try:
            arrived = self._inner.wait(ticket.inner, upto)
        except BaseException:
            self._settle(ticket, None, began, FAILED)
            raise
        if ticket.done < len(ticket.reads):
            self._settle(ticket, upto, began, ARRIVED)
        return arrived

    def ready(self, ticket: Ticket, upto: int, /) -> bool:
        """Pass on. What is ready is waited for next, and noted then."""
        assert isinstance(ticket, TracedTicket)
        return self._inner.ready(ticket.inner, upto)

    def cancel(self, ticket: Ticket, /) -> None:
        """Pass on; stages that are whole all the same have arrived."""
        assert isinstance(ticket, TracedTicket)
        began = time.perf_counter()
        self._inner.cancel(ticket.inner)
        while ticket.done < len(ticket.reads):
            stage = ticket.reads[ticket.done][0]
            self._settle(ticket, stage, began, ARRIVED if self._inner.ready(ticket.inner, stage) else CANCELLED)

    def close(self) -> None:
        """Pass on."""
        self._inner.close()

    def flush(self) -> None:
        """Write the rows so far."""
        self._out.flush(self._rows)
        self._rows = 0

    def _settle(self, ticket: TracedTicket, upto: int | None, began: float, state: int) -> None:
        now = time.perf_counter()
        ticket.waited_s += now - began
        seen_s = now - self._began
        while ticket.done < len(ticket.reads):
            stage, shard, offset, length = ticket.reads[ticket.done]
            if upto is not None and stage > upto:
                return
            ticket.done += 1
            layer, bank, projection, expert, experts = self._places.find(shard, offset, length)
            nbytes = min(length, self._ends[shard] - offset)  # whole pages, of which a file's last may be cut
            arrived = f"{seen_s:.6f}" if state == ARRIVED else ""
            self._out.append(
                f"{ticket.number},{int(ticket.ahead)},{layer},{bank},{projection},{expert},{experts},{shard},{offset},"
                f"{nbytes},{ticket.submit_s:.6f},{arrived},{ticket.waited_s:.6f},{state},"
                f"{ticket.phase}\n"
            )
            self._rows += 1


class IoTracer:
    """Writes the reads of a decode once it has ended; reads that a failed decode gave up are reads all the same."""

    def __init__(self, fetcher: TracedFetcher) -> None:
        self._fetcher = fetcher

    def begin(self, batch: BatchContext) -> None:
        """What is asked for from now on is for this decode."""
        self._fetcher.phase = CODES[batch.phase]

    def routing(self, bank: int, keys: Sequence[int]) -> None:
        """The fetcher is asked anyway."""

    def handled(self, bank: int) -> None:
        """The fetcher was asked."""

    def end(self, complete: bool) -> None:
        """The decode ended."""
        self._fetcher.phase = OUTSIDE
        self._fetcher.flush()

    def accepted(self, kept: Sequence[int]) -> None:
        """It makes no difference which tokens are kept."""


class _Places:
    """Which experts lie where, by the offsets of their tensors."""

    def __init__(self, facts: ModelFacts) -> None:
        spans = sorted(
            (p.shard, p.offset, p.stride, bank.layer, bank.bank, index, bank.n_expert)
            for bank in (*facts.banks, *facts.nextn_banks)
            for index, p in enumerate(bank.projections)
        )
        self._spans, self._starts = spans, [span[:2] for span in spans]

    def find(self, shard: int, offset: int, length: int) -> tuple[int, int, int, int, int]:
        """Layer, bank, projection, first expert and number of experts whole within the read."""
        index = bisect.bisect_right(self._starts, (shard, offset)) - 1
        for at in (index, index + 1):  # a read of whole pages may begin before the tensor does
            if 0 <= at < len(self._spans) and self._spans[at][0] == shard:
                _, start, stride, layer, bank, projection, n_expert = self._spans[at]
                first = max(0, -((start - offset) // stride))
                last = min(n_expert, (offset + length - start) // stride)
                if last > first:
                    return layer, bank, projection, first, last - first
        return -1, -1, -1, -1, 0


def header(facts: ModelFacts, *, direct: bool) -> Iterator[str]:
    """The lines before the rows."""
    yield f"# {VERSION}\n"
    yield f"# model={name_of(facts)} arch={facts.arch} direct={int(direct)}\n"
    yield ",".join(COLUMNS) + "\n"


def name_of(facts: ModelFacts) -> str:
    """The model's file name as one word without its folder."""
    return "_".join(facts.path.replace("\\", "/").rsplit("/", 1)[-1].split())
