"""Expert residency: which entries are in memory, within a budget counted in pages really held.

The policy ranks, the store owns bytes. An entry is one expert of one bank with all its projections, at the address
where the kernel looks for it. :class:`ExpertStore` keeps entries between tokens and moves an evicted entry's pages
under the newcomer, because freeing, faulting and zeroing pages costs more than reading them. :class:`SharedSlots` keeps
nothing: all layers use one set of slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bmoe.contracts import BankFacts, CachePolicy, ExpertKey, ReadBatch
from bmoe.errors import PluginError
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
    recycled: int = 0


class Store(Protocol):
    """What the stream needs of either form. ``addresses[bank]`` are the data addresses of its projections."""

    counters: StoreCounters
    addresses: list[list[int]]
    slot_bytes: int
    budget_bytes: int

    @property
    def held_bytes(self) -> int:
        """Bytes of pages that entries hold now."""

    def touched(self, keys: list[ExpertKey]) -> None:
        """A routing that was all hits."""

    def stage(self, bank: int, keys: list[ExpertKey]) -> ReadBatch | None:
        """Make room for what is missing of a routing and say what to read; None if nothing is missing."""

    def commit(self) -> None:
        """The reads of the last stage arrived."""

    def abandon(self) -> None:
        """The reads of the last stage failed: none of its entries is valid."""

    def settle(self) -> None:
        """Between decodes: give back what the layer in flight took over the budget."""

    def close(self) -> None:
        """Give all memory back."""


class SharedSlots:
    """Cache off: one slot buffer per projection for all layers, so that no page is ever freed or faulted again."""

    def __init__(self, banks: Sequence[BankFacts], seam: Seam) -> None:
        widest = max(len(b.projections) for b in banks)
        sizes = [max(region_bytes(b, p) for b in banks if p < len(b.projections)) for p in range(widest)]
        self._regions = [memory.reserve(size, huge=True) for size in sizes]
        shared = [region.address for region in self._regions]
        self._pages = [BankPages(b, shared[: len(b.projections)]) for b in banks]
        self._key_base = seam.key_base
        self.addresses = [pages.data for pages in self._pages]
        self.counters = StoreCounters()
        self.slot_bytes = sum(sizes)
        self.budget_bytes = self.held_bytes = 0

    def touched(self, keys: list[ExpertKey]) -> None:
        """Never called: nothing is resident."""

    def stage(self, bank: int, keys: list[ExpertKey]) -> ReadBatch | None:
        """Everything is read, every time."""
        base = self._key_base[bank]
        self.counters.lookups += len(keys)
        return self._pages[bank].reads([key - base for key in keys])

    def commit(self) -> None:
        """Slots are overwritten by the next layer; there is nothing to note."""

    def abandon(self) -> None:
        """Likewise."""

    def settle(self) -> None:
        """Likewise."""

    def close(self) -> None:
        """Give the slots back."""
        for region in self._regions:
            region.close()


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
        self._budget = budget_bytes // memory.PAGE
        sizes = [[region_bytes(b, p) for p in range(len(b.projections))] for b in banks]
        # With room for everything, huge pages hold no more than the experts themselves and spare the TLB.
        self._whole = sum(map(sum, sizes)) <= budget_bytes
        self._regions = [[memory.reserve(size, huge=self._whole) for size in row] for row in sizes]
        self._pages = [BankPages(b, [r.address for r in row]) for b, row in zip(banks, self._regions, strict=True)]
        self.addresses = [pages.data for pages in self._pages]
        self._bank_of = {base >> 16: index for index, base in enumerate(seam.key_base)}
        self._key_base, self._entry_base, self._resident = seam.key_base, seam.entry_base, seam.resident
        self._touch, self._victim = policy.touch, policy.victim
        self._admitted, self._forget = policy.admit, policy.forget
        self._held = 0
        self._edge_users: dict[int, int] = {}
        self._idle_edges: dict[int, None] = {}
        self._idle_limit = max(16, self._budget // 128)
        self._evicted: set[ExpertKey] = set()
        self._staged: tuple[int, list[ExpertKey]] | None = None
        # a page range moved to a new place is a mapping of its own and splits the one around it
        self._moved: set[int] = set()
        self._move_limit = sum(b.n_expert * len(b.projections) for b in banks)
        if max_mappings is not None:
            self._move_limit = max(0, (max_mappings - memory.count_mappings() - 2048) // 2)

    @property
    def held_bytes(self) -> int:
        """Bytes of pages that entries hold now, edges shared by two neighbours counted once."""
        return self._held * memory.PAGE

    def touched(self, keys: list[ExpertKey]) -> None:
        """A routing that was all hits."""
        self.counters.lookups += len(keys)
        self.counters.hits += len(keys)
        self._touch(keys)

    def stage(self, bank: int, keys: list[ExpertKey]) -> ReadBatch | None:
        """Rank, evict until the missing entries fit, and say what to read.

        Entries of this routing are pinned. If they alone exceed the budget they are admitted all the same, since one
        matmul needs them together; :meth:`settle` takes the excess back.
        """
        self._touch(keys)
        shift = self._entry_base[bank] - self._key_base[bank]
        resident = self._resident
        missing = [key for key in keys if not resident[key + shift]]
        counters = self.counters
        counters.lookups += len(keys)
        counters.hits += len(keys) - len(missing)
        if not missing:
            return None
        self._staged = (bank, missing)
        pinned = set(keys)
        pages, base = self._pages[bank], self._key_base[bank]
        experts = [key - base for key in missing]
        try:
            for key, expert in zip(missing, experts, strict=True):
                self._bring_in(key, pages, expert, self._make_room(pages.pages, pinned))
        except BaseException:
            self._start_over()
            raise
        return pages.reads(experts)

    def commit(self) -> None:
        """Mark the staged entries valid."""
        if self._staged is not None:
            bank, keys = self._staged
            shift = self._entry_base[bank] - self._key_base[bank]
            for key in keys:
                self._resident[key + shift] = 1
            self._staged = None

    def abandon(self) -> None:
        """Forget the staged entries and return their pages."""
        if self._staged is not None:
            bank, keys = self._staged
            pages, base, entry = self._pages[bank], self._key_base[bank], self._entry_base[bank]
            try:
                for key in keys:
                    self._resident[key - base + entry] = 0
                    self._forget(key)
                    self._drop(pages, key - base)
                    self._return(pages.interior[key - base])
                self._staged = None
            except BaseException:
                self._start_over()
                raise

    def settle(self) -> None:
        """Evict down to the budget; nothing is pinned between decodes."""
        try:
            if self._staged is not None:  # an interrupt came between two steps
                self._start_over()
            while self._held > self._budget:
                if self._idle_edges:
                    self._sweep_edges()
                elif (donor := self._evict(())) is not None:
                    self._return(donor)
                else:
                    break
        except BaseException:
            self._start_over()
            raise

    def resize(self, budget_bytes: int) -> None:
        """Change the budget between tokens, under memory pressure for one; shrinking evicts at once."""
        self.budget_bytes, self._budget = budget_bytes, budget_bytes // memory.PAGE
        if self._whole and budget_bytes < sum(region.nbytes for row in self._regions for region in row):
            self._whole = False  # the kernel may put huge pages together later, which would hold an entry's neighbours
            for row in self._regions:
                for region in row:
                    memory.refuse_huge(region.address, region.nbytes)
        self._idle_limit = max(16, self._budget // 128)
        self.settle()

    def close(self) -> None:
        """Give all regions back."""
        for row in self._regions:
            for region in row:
                region.close()

    def _make_room(self, pages: int, pinned: set[ExpertKey]) -> tuple[tuple[int, int], ...]:
        """Evict until ``pages`` fit; the interior spans of the last victim are left for the newcomer to take over."""
        donor: tuple[tuple[int, int], ...] = ()
        while self._held + pages > self._budget:
            if len(self._idle_edges) > self._idle_limit:
                self._sweep_edges()
                continue
            spans = self._evict(pinned)
            if spans is None:
                break
            self._return(donor)
            donor = spans
        return donor

    def _evict(self, pinned: set[ExpertKey] | tuple[()]) -> tuple[tuple[int, int], ...] | None:
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
        self._drop(self._pages[bank], expert)
        return self._pages[bank].interior[expert]

    def _bring_in(self, key: ExpertKey, pages: BankPages, expert: int, donor: tuple[tuple[int, int], ...]) -> None:
        self._admitted(key, False)
        self.counters.admissions += 1
        self.counters.rereads += key in self._evicted
        self._held += pages.interior_pages[expert]
        users, idle = self._edge_users, self._idle_edges
        for page in pages.edges[expert]:
            count = users.get(page)
            if count is not None:
                users[page] = count + 1
                continue
            users[page] = 1
            if page in idle:
                del idle[page]
            else:
                self._held += 1
        if donor:
            self._take_over(donor, pages.interior[expert])

    def _take_over(self, donor: tuple[tuple[int, int], ...], target: tuple[tuple[int, int], ...]) -> None:
        for index, (source, size) in enumerate(donor):
            address, wanted = target[index] if index < len(target) else (0, 0)
            moved = min(size, wanted)
            if moved and (address in self._moved or len(self._moved) < self._move_limit):
                self._moved.add(address)
                if memory.recycle(source, address, moved):
                    self.counters.recycled += 1
                else:
                    moved = 0
            else:
                moved = 0
            memory.release(source + moved, size - moved)

    def _drop(self, pages: BankPages, expert: int) -> None:
        self._held -= pages.interior_pages[expert]
        users = self._edge_users
        for page in pages.edges[expert]:
            count = users[page]
            if count > 1:
                users[page] = count - 1
            else:
                del users[page]
                self._idle_edges[page] = None

    def _start_over(self) -> None:
        """A policy failed, or an interrupt came, half way through: nothing is resident or held any more."""
        for base, key_base, pages in zip(self._entry_base, self._key_base, self._pages, strict=True):
            for expert in range(len(pages.edges)):
                with contextlib.suppress(Exception):
                    self._forget(key_base + expert)
                self._resident[base + expert] = 0
        self._staged = None
        self._edge_users.clear()
        self._idle_edges.clear()
        self._held = 0
        for row in self._regions:
            for region in row:
                memory.release(region.address, region.nbytes)

    def _sweep_edges(self) -> None:
        """Return edge pages without a user. Kept until they are many: a neighbour often comes back to them."""
        for page in self._idle_edges:
            memory.release(page, memory.PAGE)
        self._held -= len(self._idle_edges)
        self._idle_edges.clear()

    @staticmethod
    def _return(spans: tuple[tuple[int, int], ...]) -> None:
        for address, size in spans:
            memory.release(address, size)
