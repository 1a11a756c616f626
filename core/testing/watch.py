"""Stands between the engine and the plugins under test: poisons memory, checks every read, counts what was asked.

Bytes that nobody read are 0xAA here, so that an entry used without its read gives other logits than the reference.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
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


class _Watched:
    """A ticket, its rows and entries, and how many bytes of it were told to have arrived."""

    def __init__(self, rows: list[Read], found: Counter[ExpertKey], failing: bool) -> None:
        self.rows, self.found, self.failing = rows, found, failing
        self.nbytes = self.arrived = 0
        self.inner: Ticket | None = None


class WatchedFetcher:
    """Poisons the destination of every read before the fetcher under test sees it, and checks that it is an expert's.

    ``read`` counts the entries that were read, ``nbytes`` what arrived. With ``fail_in`` n, the n-th batch from now
    raises ReadError: when it is submitted, without being read, or when ``fail_stage`` (negative: from the last) is
    waited for.
    """

    def __init__(self, inner: Fetcher, facts: ModelFacts) -> None:
        self._inner, self._facts = inner, facts
        self._entries: dict[Read, tuple[ExpertKey, int, int]] = {}
        self._ends = [shard.nbytes for shard in facts.shards]
        self._projections = {expert_key(b.layer, 0, b.bank) >> 16: len(b.projections) for b in facts.banks}
        self.read: Counter[ExpertKey] = Counter()
        self.batches = self.nbytes = 0
        self.fail_in = self.fail_stage = 0

    @property
    def direct(self) -> bool:
        """As the fetcher under test says."""
        return self._inner.direct

    @property
    def note(self) -> str:
        """As the fetcher under test says."""
        return self._inner.note

    def expect(self, addresses: Sequence[Sequence[int]]) -> None:
        """Learn where each bank's experts lie in memory: from then on any other read is an error."""
        for bank, places in zip(self._facts.banks, addresses, strict=True):
            self._entries.update(_reads(bank, places))

    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Ticket:
        """Check, poison, pass on."""
        rows = [reads.row(index) for index in range(len(reads))]
        found: Counter[ExpertKey] = Counter()
        for row in rows:
            assert row in self._entries, f"no expert lies there: {row}"
            found[self._entries[row][0]] += 1
        assert [row.stage for row in rows] == sorted(row.stage for row in rows), "reads are not ordered by stage"
        for key, count in found.items():
            assert count == self._projections[key >> 16], f"{count} projections of entry {key:#x} are read"
        self.fail_in -= 1
        ticket = _Watched(rows, found, self.fail_in == 0)
        if ticket.failing and self.fail_stage == 0:
            self._fail(ticket)
        for row in rows:
            memory.fill(row.address, POISON, row.length)
        self.batches += 1
        self.read.update(found.keys())
        ticket.inner = self._inner.submit(reads, ahead=ahead)
        ticket.nbytes = ticket.inner.nbytes
        return ticket

    def wait(self, ticket: Ticket, upto: int, /) -> int:
        """Pass on; a batch is waited for in one or several steps, and each says what has arrived so far."""
        watched, inner = _of(ticket)
        if watched.failing:
            last = watched.rows[-1].stage
            if upto >= self.fail_stage % (last + 1):
                self._inner.wait(inner, last)
                self._fail(watched)
        arrived = self._inner.wait(inner, upto)
        self.nbytes += arrived - watched.arrived
        watched.arrived = arrived
        return arrived

    def ready(self, ticket: Ticket, upto: int, /) -> bool:
        """Pass on."""
        return self._inner.ready(_of(ticket)[1], upto)

    def cancel(self, ticket: Ticket, /) -> None:
        """Pass on; what was cancelled counts as not read."""
        watched, inner = _of(ticket)
        self._inner.cancel(inner)
        self.read.subtract(watched.found.keys())
        self.nbytes -= watched.arrived
        watched.found, watched.arrived = Counter(), 0

    def _fail(self, ticket: _Watched) -> None:
        for row in ticket.rows:
            _, start, size = self._entries[row]  # a real read would not destroy what a neighbour holds
            memory.fill(start, POISON, size)
        ticket.failing = False
        raise ReadError("a read failed because the gate wanted it to")

    def bounds(self) -> tuple[int, int]:
        """The least and the most bytes that the entries read so far can have taken."""
        least = most = 0
        for row, (key, _, _) in self._entries.items():
            least += self.read[key] * row.required
            most += self.read[key] * min(row.length, self._ends[row.shard] - row.offset)
        return least, most

    def close(self) -> None:
        """Pass on."""
        self._inner.close()


def _of(ticket: Ticket) -> tuple[_Watched, Ticket]:
    assert isinstance(ticket, _Watched), "a ticket of another fetcher"
    assert ticket.inner is not None
    return ticket, ticket.inner


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
            self.fetcher = WatchedFetcher(plan.fetch.provider.build(options, facts), plan.facts)
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
        for bank, places in zip(engine.facts.banks, addresses, strict=True):
            for projection, address in enumerate(places):
                memory.fill(memory.round_down(address), POISON, region_bytes(bank, projection))
        self.fetcher.expect(addresses)


def within_reach(facts: ModelFacts) -> list[str] | None:
    """Where this process can still touch routed experts in a mapping of the model, or None if it cannot be told.

    Every mapping of an expert page must be inaccessible and backed by no file.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    found: list[str] = []
    for shard, file in enumerate(facts.shards):
        path = os.path.realpath(file.path)
        bases = memory.file_mappings(os.stat(path).st_ino, path)
        assert bases, f"{path} is not mapped at all"
        spans = [span for bank in facts.banks for span in _page_spans(bank, shard)]
        ranges = [(base + first, base + last) for base in bases for first, last in spans]
        for line in lines:
            place, mode, _, _, inode = line.split()[:5]
            low, high = (int(part, 16) for part in place.split("-"))
            touched = any(low < last and first < high for first, last in ranges)
            if touched and (mode != "---p" or inode != "0"):
                found.append(line)
        covered = [tuple(int(part, 16) for part in line.split(None, 1)[0].split("-")) for line in lines]
        found += [
            f"{first:x}-{last:x} is not reserved"
            for first, last in ranges
            if not any(low < last and first < high for low, high in covered)
        ]
    return found


def _page_spans(bank: BankFacts, shard: int) -> list[tuple[int, int]]:
    spans = [(p.offset, p.offset + p.stride * bank.n_expert) for p in bank.projections if p.shard == shard]
    pages = [(memory.round_up(first), memory.round_down(last)) for first, last in spans]
    return [(first, last) for first, last in pages if first < last]


def _reads(bank: BankFacts, places: Sequence[int]) -> dict[Read, tuple[ExpertKey, int, int]]:
    """The reads that bring in each expert of a bank: its key, and where its own bytes begin and how many there are."""
    reads: dict[Read, tuple[ExpertKey, int, int]] = {}
    for stage, (p, place) in enumerate(zip(bank.projections, places, strict=True)):
        for expert in range(bank.n_expert):
            first = p.offset + expert * p.stride
            start, offset = place + expert * p.stride, memory.round_down(first)
            length = memory.round_up(first + p.stride) - offset
            read = Read(start - (first - offset), length, first + p.stride - offset, offset, p.shard, stage)
            reads[read] = (expert_key(bank.layer, expert, bank.bank), start, p.stride)
    return reads
