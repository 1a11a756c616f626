"""Stands between the engine and the plugins under test: poisons memory, checks every read, counts what was asked.

Bytes that nobody read are 0xAA here, so that an entry used without its read gives other logits than the reference.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bmoe.contracts import (
    BankFacts,
    CachePolicy,
    ExpertKey,
    Facts,
    Fetcher,
    ModelFacts,
    Options,
    Read,
    ReadBatch,
    Ticket,
    expert_key,
)
from bmoe.engine import Engine
from bmoe.errors import ReadError
from bmoe.native import memory
from bmoe.pages import region_bytes
from bmoe.plan import Plan

POISON = 0xAA


@dataclass(slots=True)
class _Slice:
    """An expert's own bytes of one projection: ``start`` in memory, ``first`` in the file, ``stride`` bytes."""

    key: ExpertKey
    start: int
    first: int
    stride: int


@dataclass(slots=True)
class _Watched:
    """A ticket: the slices that it brings in, the bytes of it that have arrived, and whether it is to fail."""

    inner: Ticket | None
    slices: list[_Slice]
    last: int
    fails: bool
    rows: list[Read] = field(default_factory=list)
    arrived: int = 0
    nbytes: int = 0


class WatchedFetcher:
    """Poisons the destination of every read before the fetcher under test sees it, and checks where it leads.

    A read is of one expert's pages, or of several that lie side by side.

    ``read`` counts the entries that were read, ``nbytes`` what arrived. With ``fail_in`` n, the n-th batch from now
    raises ReadError: when it is submitted, without being read, or when ``fail_stage`` (negative: from the last) is
    waited for.
    """

    def __init__(self, inner: Fetcher, facts: ModelFacts, banks: Sequence[BankFacts]) -> None:
        """``banks`` are what is streamed of the model."""
        self._inner, self._facts, self._banks = inner, facts, banks
        self._slices: list[tuple[int, int, list[_Slice]]] = []
        self._staged: Callable[[], Collection[ExpertKey]] = frozenset
        self._ends = [shard.nbytes for shard in facts.shards]
        self._projections = {expert_key(b.layer, 0, b.bank) >> 16: len(b.projections) for b in banks}
        self._parts: Counter[ExpertKey] = Counter()
        self.read: Counter[ExpertKey] = Counter()
        self._out: list[_Watched] = []
        self.batches = self.nbytes = self._most = 0
        self.fail_in = self.fail_stage = 0

    @property
    def direct(self) -> bool:
        """As the fetcher under test says."""
        return self._inner.direct

    @property
    def note(self) -> str:
        """As the fetcher under test says."""
        return self._inner.note

    def expect(self, addresses: Sequence[Sequence[int]], staged: Callable[[], Collection[ExpertKey]]) -> None:
        """Learn where each bank's experts lie in memory: from then on any other read is an error.

        ``staged`` says which entries have their memory and may be read.
        """
        self._staged = staged
        for bank, places in zip(self._banks, addresses, strict=True):
            for stage, (p, place) in enumerate(zip(bank.projections, places, strict=True)):
                row = [
                    _Slice(
                        expert_key(bank.layer, e, bank.bank), place + e * p.stride, p.offset + e * p.stride, p.stride
                    )
                    for e in range(bank.n_expert)
                ]
                self._slices.append((stage, p.shard, row))

    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Ticket:
        """Check, poison, pass on."""
        rows = [reads.row(index) for index in range(len(reads))]
        found = {(row.stage, slice_.key): slice_ for row in rows for slice_ in self._covered(row)}
        slices = list(found.values())
        assert [row.stage for row in rows] == sorted(row.stage for row in rows), "reads are not ordered by stage"
        self.fail_in -= 1
        watched = _Watched(None, slices, rows[-1].stage, self.fail_in == 0, rows)
        if watched.fails and self.fail_stage == 0:
            self._fail(watched)
        self._alone(rows)
        for row in rows:
            memory.fill(row.address, POISON, row.length)
            self._most += min(row.length, self._ends[row.shard] - row.offset)
        self.batches += 1
        for slice_ in slices:
            self._parts[slice_.key] += 1
            if self._parts[slice_.key] == self._projections[slice_.key >> 16]:
                self.read[slice_.key] += 1
                del self._parts[slice_.key]
        watched.inner = self._inner.submit(reads, ahead=ahead)
        watched.nbytes = watched.inner.nbytes
        self._out = [*self._out, watched]
        return watched

    def wait(self, ticket: Ticket, upto: int, /) -> int:
        """Pass on; a batch is waited for in one or several steps, and each says what has arrived so far."""
        assert isinstance(ticket, _Watched)
        assert ticket.inner is not None
        if ticket.fails and upto >= self.fail_stage % (ticket.last + 1):
            self._inner.wait(ticket.inner, ticket.last)
            self._fail(ticket)
        arrived = self._inner.wait(ticket.inner, upto)
        self.nbytes += arrived - ticket.arrived
        ticket.arrived = arrived
        return arrived

    def ready(self, ticket: Ticket, upto: int, /) -> bool:
        """Pass on."""
        assert isinstance(ticket, _Watched)
        assert ticket.inner is not None
        return self._inner.ready(ticket.inner, upto)

    def cancel(self, ticket: Ticket, /) -> None:
        """Pass on; what it would have brought in is read again when it is needed."""
        assert isinstance(ticket, _Watched)
        assert ticket.inner is not None
        for slice_ in ticket.slices:
            self._parts.pop(slice_.key, None)
        self._inner.cancel(ticket.inner)
        self._out = [other for other in self._out if other is not ticket]
        for row in ticket.rows if ticket.arrived < ticket.nbytes else ():
            self._heal(row, ticket.slices)

    def _alone(self, rows: Sequence[Read]) -> None:
        """No page may be the target of two reads at a time: a drive that decrypts in place would decrypt it twice."""
        ready, out = self._inner.ready, [(t, t.inner) for t in self._out if t.inner is not None]
        self._out = [t for t, inner in out if not ready(inner, t.last)]
        flying = [row for t, inner in out for row in t.rows if not ready(inner, row.stage)]
        spans = sorted((row.address, row.address + row.length) for row in (*flying, *rows))
        for (_, end), (begin, _) in itertools.pairwise(spans):
            assert end <= begin, "two reads have one page for their target"

    def _covered(self, row: Read) -> list[_Slice]:
        """The experts whose slices a read brings in: exactly their pages, from the first one's to the last one's."""
        staged = self._staged()
        for stage, shard, slices in self._slices:
            whole = _reading(slices, stage, shard)
            within = 0 <= row.offset - whole.offset < whole.length  # all layers may have one place in memory
            if (
                (stage, shard) == (row.stage, row.shard)
                and within
                and row.address - whole.address == row.offset - whole.offset
            ):
                break
        else:
            raise AssertionError(f"no expert lies there: {row}")
        last = row.address + row.required
        inside = [s for s in slices if row.address <= s.start and s.start + s.stride <= last]
        found = [s for s in inside if s.key in staged]
        assert found, f"no expert that was asked for lies there: {row}"
        parts = [_reading([s], stage, shard) for s in found]
        together = all(a.offset + a.length >= b.offset for a, b in itertools.pairwise(parts))
        assert together, f"experts nobody asked for are read: {row}"
        assert row == _reading(found, stage, shard), f"not the pages of the experts that it covers: {row}"
        return found

    def _heal(self, row: Read, slices: Sequence[_Slice]) -> None:
        """What is never read does not touch the neighbours whose pages it shares: give them their bytes back."""
        own = [(s.start - row.address, s.start + s.stride - row.address) for s in slices]
        own = [(first, last) for first, last in own if last > 0 and first < row.length]
        with open(self._facts.shards[row.shard].path, "rb") as file:
            file.seek(row.offset)
            content = file.read(row.length)
        edges = [0, *(at for span in sorted(own) for at in span), len(content)]
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            if 0 <= first < last <= len(content):
                memory.view(row.address + first, last - first)[:] = content[first:last]

    def _fail(self, ticket: _Watched) -> None:
        for slice_ in ticket.slices:  # a real read would not destroy what a neighbour holds
            memory.fill(slice_.start, POISON, slice_.stride)
        ticket.fails = False
        raise ReadError("a read failed because the gate wanted it to")

    def bounds(self) -> tuple[int, int]:
        """The least and the most bytes that the entries read so far can have taken."""
        least = sum(self.read[s.key] * s.stride for _, _, slices in self._slices for s in slices)
        return least, self._most

    def close(self) -> None:
        """Pass on."""
        self._inner.close()


def _reading(slices: Sequence[_Slice], stage: int, shard: int) -> Read:
    """The read of slices that lie side by side: their pages, of which the last may end beyond the file."""
    first, last = slices[0], slices[-1]
    offset, end = memory.round_down(first.first), last.first + last.stride
    address = first.start - (first.first - offset)
    return Read(address, memory.round_up(end) - offset, end - offset, offset, shard, stage)


class WatchedPolicy:
    """Counts what a cache policy is asked and told."""

    def __init__(self, inner: CachePolicy) -> None:
        self._inner = inner
        self.below_cycle = inner.below_cycle
        self.touched: Counter[ExpertKey] = Counter()
        self.admitted: Counter[ExpertKey] = Counter()
        self.victims = self.forgotten = 0

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        """Count and pass on."""
        self.touched.update(keys)
        self._inner.touch(keys)

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        """Count and pass on."""
        self.admitted[key] += 1
        self._inner.admit(key, cold)

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        """Count and pass on."""
        self.victims += 1
        return self._inner.victim(pinned)

    def forget(self, key: ExpertKey, /) -> None:
        """Count and pass on."""
        self.forgotten += 1
        self._inner.forget(key)


class Watch:
    """What a watched engine's plugins were asked; ``policy`` is None while the cache is off."""

    fetcher: WatchedFetcher
    policy: WatchedPolicy | None = None

    def over(self, plan: Plan) -> Plan:
        """``plan`` with its fetcher and its cache policy watched."""

        def fetcher(options: Options, facts: Facts) -> Any:
            self.fetcher = WatchedFetcher(plan.fetch.provider.build(options, facts), plan.facts, plan.banks)
            return self.fetcher

        def policy(options: Options, facts: Facts) -> Any:
            self.policy = WatchedPolicy(plan.cache.provider.build(options, facts))
            return self.policy

        return replace(
            plan,
            fetch=replace(plan.fetch, provider=replace(plan.fetch.provider, build=fetcher)),
            cache=replace(plan.cache, provider=replace(plan.cache.provider, build=policy)),
        )

    def begin(self, engine: Engine) -> None:
        """Once the engine is open: poison all of its expert memory and learn where entries lie."""
        assert engine.stream is not None, "nothing is streamed"
        addresses = engine.stream.store.addresses
        for bank, places in zip(engine.plan.banks, addresses, strict=True):
            for projection, address in enumerate(places):
                memory.fill(memory.round_down(address), POISON, region_bytes(bank, projection))
        store = engine.stream.store

        def staged() -> set[ExpertKey]:
            return {key for keys in store.staged.values() for key in keys} | set(getattr(store, "guesses", ()))

        self.fetcher.expect(addresses, staged)


def within_reach(facts: ModelFacts, streamed: Sequence[BankFacts]) -> list[str] | None:
    """Where this process can still touch routed experts in a mapping of the model, or None if it cannot be told.

    Every mapping of a ``streamed`` bank's page must be inaccessible and backed by no file. The head's banks are
    not among those unless it drafts: llama.cpp does not load them then and gives their end of the file back, so
    that other memory may lie there, but the file may not.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    found: list[str] = []
    for shard, file in enumerate(facts.shards):
        path = os.path.realpath(file.path)
        number = os.stat(path).st_ino
        bases = memory.file_mappings(number, path)
        assert bases, f"{path} is not mapped at all"
        for bank in (*facts.banks, *facts.nextn_banks):
            for first, last in ((base + at, base + end) for base in bases for at, end in _page_spans(bank, shard)):
                touched = [line for line in lines if _overlaps(line, first, last)]
                if bank in streamed:
                    found += [line for line in touched if line.split()[1] != "---p" or line.split()[4] != "0"]
                    found += [] if touched else [f"{first:x}-{last:x} is not reserved"]
                else:
                    found += [line for line in touched if line.split()[4] == str(number) or line.endswith(path)]
    return found


def _overlaps(line: str, first: int, last: int) -> bool:
    low, high = (int(part, 16) for part in line.split(None, 1)[0].split("-"))
    return low < last and first < high


def _page_spans(bank: BankFacts, shard: int) -> list[tuple[int, int]]:
    spans = [(p.offset, p.offset + p.stride * bank.n_expert) for p in bank.projections if p.shard == shard]
    pages = [(memory.round_up(first), memory.round_down(last)) for first, last in spans]
    return [(first, last) for first, last in pages if first < last]
