"""Expert residency: which entries are in memory, within a budget counted in pages really held.

The policy ranks, the store owns bytes. An entry is one expert of one bank with all its projections, at the address
where the kernel looks for it; :mod:`bmoe.frames` brings memory there. Without a cache :mod:`bmoe.slots` stands in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bmoe.contracts import BankFacts, CachePolicy, ExpertKey, ReadBatch
from bmoe.errors import PluginError
from bmoe.frames import Frames, Spans
from bmoe.native import memory
from bmoe.native.evalhook import Seam
from bmoe.pages import BankPages, region_bytes


@dataclass(slots=True)
class StoreCounters:
    """Counts since open. ``rereads``: admissions of entries that had been evicted before."""

    lookups: int = 0
    hits: int = 0
    admissions: int = 0
    evictions: int = 0
    rereads: int = 0


class Store(Protocol):
    """What the stream needs of either form. ``addresses[bank]`` are the data addresses of its projections."""

    counters: StoreCounters
    addresses: list[list[int]]
    slot_bytes: int
    budget_bytes: int
    staged: dict[int, list[ExpertKey]]
    """The entries, per bank, that have their memory and wait for their bytes."""

    @property
    def room_bytes(self) -> int:
        """Bytes of the budget that are set aside for guesses."""

    @property
    def held_bytes(self) -> int:
        """Bytes of pages that are held now for entries."""

    def touched(self, keys: list[ExpertKey]) -> None:
        """A routing that was all hits."""

    def stage(self, bank: int, keys: list[ExpertKey]) -> ReadBatch | None:
        """Make room for what is missing of a routing and say what to read; None if nothing is to be read for it.

        What :meth:`ahead` has staged is not read again.
        """

    def ahead(self, bank: int) -> ReadBatch | None:
        """Make room for all that is missing of the next bank and say what to read, in file order.

        None if it does not fit beside the bank that was staged last. Reads of a projection may begin when the product
        with that projection of the bank before was computed.
        """

    def commit(self, bank: int) -> None:
        """All reads that were staged for a bank arrived."""

    def abandon(self) -> None:
        """Reads failed or were given up: none of the entries that are staged is valid."""

    def retire(self, bank: int, keys: list[ExpertKey]) -> None:
        """A routing of many tokens was computed: what its last tokens used is worth keeping, the rest is not."""

    def withhold(self) -> None:
        """Until :meth:`hear`, no use is ranked: it is of tokens that may be rejected. What comes in enters cold."""

    def hear(self, uses: Iterable[list[ExpertKey]]) -> None:
        """Rank these uses, in order, as far as the entries are here, and all those to come."""

    def settle(self) -> None:
        """Between decodes: give back what the layer in flight took over the budget."""

    def close(self) -> None:
        """Give all memory back."""


class ExpertStore:
    """Cache on. ``seam.resident`` mirrors which entries are valid, for the eval hook's own look-ups."""

    def __init__(
        self,
        banks: Sequence[BankFacts],
        seam: Seam,
        policy: CachePolicy,
        budget_bytes: int,
        max_mappings: int | None,
    ) -> None:
        """``max_mappings``: mappings that a process may have; near it pages are no longer moved. None = no limit."""
        self.budget_bytes = budget_bytes
        self.slot_bytes = 0
        self.counters = StoreCounters()
        sizes = [[region_bytes(b, p) for p in range(len(b.projections))] for b in banks]
        # With room for everything, huge pages hold no more than the experts themselves and spare the TLB.
        self._whole = sum(map(sum, sizes)) <= budget_bytes
        self._regions = [[memory.reserve(size, huge=self._whole) for size in row] for row in sizes]
        self._pages = [BankPages(b, [r.address for r in row]) for b, row in zip(banks, self._regions, strict=True)]
        self._whole_pages = [sum(row) // memory.PAGE for row in sizes]
        self.addresses = [pages.data for pages in self._pages]
        self._bank_of = {base >> 16: index for index, base in enumerate(seam.key_base)}
        self._key_base, self._entry_base, self._resident = seam.key_base, seam.entry_base, seam.resident
        self._touch, self._victim = policy.touch, policy.victim
        self._admitted, self._forget = policy.admit, policy.forget
        slices = sum(b.n_expert * len(b.projections) for b in banks)
        self.frames = Frames(budget_bytes // memory.PAGE, slices, max_mappings)
        self._evicted: set[ExpertKey] = set()
        self._pinned: set[ExpertKey] = set()
        self._withheld = False
        self.staged: dict[int, list[ExpertKey]] = {}
        self._passing: dict[ExpertKey, None] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of pages that are held now, edges shared by two neighbours counted once."""
        return (self.frames.held + self.frames.spare) * memory.PAGE

    def touched(self, keys: list[ExpertKey]) -> None:
        """A routing that was all hits."""
        self.counters.lookups += len(keys)
        self.counters.hits += len(keys)
        self._use(keys)

    def stage(self, bank: int, keys: list[ExpertKey]) -> ReadBatch | None:
        """Rank, evict until the missing entries fit, and say what to read.

        Entries of this routing are pinned. If they alone exceed the budget they are admitted all the same, since one
        matmul needs them together; :meth:`settle` takes the excess back.
        """
        self._use(keys)
        shift = self._entry_base[bank] - self._key_base[bank]
        resident = self._resident
        missing = [key for key in keys if not resident[key + shift]]
        counters = self.counters
        counters.lookups += len(keys)
        counters.hits += len(keys) - len(missing)
        self._pinned = set(keys)
        if arriving := self.staged.get(bank):
            known = set(arriving)
            self._pinned |= known
            missing = [key for key in missing if key not in known]
        try:
            missing = self._claim(bank, missing)
        except BaseException:
            self._start_over()
            raise
        if not missing:
            return None
        return self._pages[bank].reads(self._admit(bank, missing, cold=self._withheld))

    def ahead(self, bank: int) -> ReadBatch | None:
        """As :class:`Store` says; the pinned entries are those of the routing staged last."""
        whole = self._whole_pages
        if bank == 0 or whole[bank - 1] + whole[bank] > self._limit():
            return None
        key, entry = self._key_base[bank], self._entry_base[bank]
        missing = [key + e for e in range(len(self._pages[bank].edges)) if not self._resident[entry + e]]
        if not missing:
            return None
        self._pinned.update(range(key, key + len(self._pages[bank].edges)))
        return self._pages[bank].reads(self._admit(bank, missing, cold=True))

    def tell(self, heard: Callable[[Sequence[ExpertKey]], None]) -> None:
        """Tell ``heard`` of every use from now on, before the policy."""
        touch = self._touch

        def both(keys: Sequence[ExpertKey], /) -> None:
            heard(keys)
            touch(keys)

        self._touch = both

    def preload(self, keys: Sequence[ExpertKey], nbytes: int) -> dict[int, list[int]]:
        """Bring memory to entries that may be used, the most wanted first, as far as ``nbytes`` of the budget go.

        Their experts by bank, which are to be read (:meth:`reads`) and committed. Nothing is evicted for them.
        """
        limit = min(nbytes // memory.PAGE, self._limit())
        found: dict[int, list[int]] = {}
        for key in keys:
            bank = self._bank_of[key >> 16]
            if self.frames.held + self._pages[bank].pages > limit:
                break
            found.setdefault(bank, []).extend(self._admit(bank, [key], cold=True))
        return {bank: sorted(experts) for bank, experts in sorted(found.items())}

    def reads(self, bank: int, experts: Sequence[int]) -> ReadBatch:
        """What brings experts of a bank to their places."""
        return self._pages[bank].reads(experts)

    def commit(self, bank: int) -> None:
        """Mark the bank's staged entries valid."""
        shift = self._entry_base[bank] - self._key_base[bank]
        for key in self.staged.get(bank, ()):
            self._resident[key + shift] = 1
        self.staged.pop(bank, None)

    def abandon(self) -> None:
        """Forget the staged entries and return their pages."""
        try:
            for bank, keys in self.staged.items():
                pages, base, entry = self._pages[bank], self._key_base[bank], self._entry_base[bank]
                for key in keys:
                    self._resident[key - base + entry] = 0
                    self._forget(key)
                    self.frames.give_back(self.frames.vacate(pages, key - base))
            self.staged.clear()
        except BaseException:
            self._start_over()
            raise

    def retire(self, bank: int, keys: list[ExpertKey]) -> None:
        """Of ``keys``, in the order of their last use, keep the bank's share of the budget; the rest goes first.

        Before that goes what was read and not used at all. Two banks of the budget are left for what is computed and
        what is read meanwhile.
        """
        whole = self._whole_pages
        spare = max(0, self.frames.budget - 2 * max(whole))
        kept = spare * whole[bank] // sum(whole) // max(1, self._pages[bank].pages)
        used, base, entry = set(keys), self._key_base[bank], self._entry_base[bank]
        held = (base + e for e in range(len(self._pages[bank].edges)) if self._resident[entry + e])
        self._passing.update(dict.fromkeys(key for key in held if key not in used))
        self._passing.update(dict.fromkeys(keys[: max(0, len(keys) - kept)]))

    def withhold(self) -> None:
        """As :class:`Store` says."""
        self._withheld = True

    def hear(self, uses: Iterable[list[ExpertKey]]) -> None:
        """As :class:`Store` says."""
        self._withheld = False
        for keys in uses:
            bank = self._bank_of[keys[0] >> 16]
            shift = self._entry_base[bank] - self._key_base[bank]
            here = [key for key in keys if self._resident[key + shift]]
            if here:
                self._use(here)

    def settle(self) -> None:
        """Evict down to the budget; nothing is pinned between decodes."""
        frames = self.frames
        self._pinned = set()
        try:
            if self.staged:  # an interrupt came between two steps
                self._start_over()
            if frames.held + frames.spare > frames.budget:
                frames.keep_spares(0)
            while frames.held > frames.budget:
                if frames.sweep():
                    continue
                donor = self._evict(self._pinned)
                if donor is None:
                    break
                frames.give_back(donor)
        except BaseException:
            self._start_over()
            raise

    @property
    def room_bytes(self) -> int:
        """Bytes of the budget that are set aside for guesses."""
        return 0

    def resize(self, budget_bytes: int, room_bytes: int = 0) -> None:
        """Change the budget between tokens, under memory pressure for one; shrinking evicts at once."""
        self.budget_bytes, self.frames.budget = budget_bytes, budget_bytes // memory.PAGE
        if self._whole and budget_bytes < sum(region.nbytes for row in self._regions for region in row):
            self._whole = False  # the kernel may put huge pages together later, which would hold an entry's neighbours
            for row in self._regions:
                for region in row:
                    memory.refuse_huge(region.address, region.nbytes)
        self.settle()

    def close(self) -> None:
        """Give all regions back."""
        for row in self._regions:
            for region in row:
                region.close()

    def _use(self, keys: list[ExpertKey]) -> None:
        if self._withheld:
            return
        self._touch(keys)
        if self._passing:
            for key in keys:
                self._passing.pop(key, None)

    def _admit(self, bank: int, keys: list[ExpertKey], *, cold: bool) -> list[int]:
        """Make room for entries and bring memory to them, one after the other; their experts."""
        self.staged.setdefault(bank, []).extend(keys)
        pages, base = self._pages[bank], self._key_base[bank]
        experts = [key - base for key in keys]
        try:
            for key, expert in zip(keys, experts, strict=True):
                donor = self._make_room(pages.pages, self._limit())
                self._admit_one(key, cold=cold)
                self.frames.occupy(pages, expert, donor)
        except BaseException:
            self._start_over()
            raise
        return experts

    def _admit_one(self, key: ExpertKey, *, cold: bool) -> None:
        self._admitted(key, cold)
        self.counters.admissions += 1
        self.counters.rereads += key in self._evicted

    def _claim(self, bank: int, missing: list[ExpertKey]) -> list[ExpertKey]:
        """What of ``missing`` has to be read; the rest is here, or on its way, and is staged."""
        return missing

    def _limit(self) -> int:
        """Pages that may be held when an entry that is needed has come."""
        return self.frames.budget

    def _make_room(self, pages: int, limit: int, donor: Spans = ()) -> Spans:
        """Evict until ``pages`` fit; the interior spans of the last victim are left for the newcomer to take over."""
        frames = self.frames
        while frames.held + pages > limit:
            if frames.crowded:
                frames.sweep()
                continue
            spans = self._evict(self._pinned)
            if spans is None:
                if frames.sweep():
                    continue
                break
            frames.give_back(donor)
            donor = spans
        return donor

    def _evict(self, pinned: set[ExpertKey]) -> Spans | None:
        key = self._passed(pinned)
        if key is None:
            key = self._victim(pinned)
        if key is None:
            return None
        bank = self._bank_of.get(key >> 16, -1)
        expert = key & 0xFFFF
        entry = self._entry_base[bank] + expert
        if bank < 0 or expert >= len(self._pages[bank].edges) or not self._resident[entry] or key in pinned:
            raise PluginError(f"the cache policy named {key} as victim, which is not resident or is pinned; correct it")
        self._forget(key)
        self._resident[entry] = 0
        self.counters.evictions += 1
        self._evicted.add(key)
        return self.frames.vacate(self._pages[bank], expert)

    def _passed(self, pinned: set[ExpertKey]) -> ExpertKey | None:
        """An entry that only the earlier part of a prompt used."""
        while self._passing:
            key = next(iter(self._passing))
            del self._passing[key]
            entry = self._entry_base[self._bank_of[key >> 16]] + (key & 0xFFFF)
            if self._resident[entry] and key not in pinned:
                return key
        return None

    def _start_over(self) -> None:
        """A policy failed, or an interrupt came, half way through: nothing is resident or held any more."""
        for base, key_base, pages in zip(self._entry_base, self._key_base, self._pages, strict=True):
            for expert in range(len(pages.edges)):
                with contextlib.suppress(Exception):
                    self._forget(key_base + expert)
                self._resident[base + expert] = 0
        self.staged.clear()
        self._passing.clear()
        self.frames.forget_all()
        for row in self._regions:
            for region in row:
                memory.release(region.address, region.nbytes)
