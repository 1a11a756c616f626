"""Without a cache: one set of slots serves all layers, so that no page is ever freed or faulted again.

A slot is free for the next layer once the product of its projection was computed. So a long prompt needs no more memory
than this to read ahead: the next layer's first projection follows this layer's into the same slot, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bmoe.contracts import BankFacts, ExpertKey, ReadBatch
from bmoe.native import memory
from bmoe.native.evalhook import Seam
from bmoe.pages import BankPages, region_bytes
from bmoe.store import StoreCounters


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
        self.budget_bytes = self.held_bytes = self.room_bytes = 0
        self.staged: dict[int, list[ExpertKey]] = {}

    def touched(self, keys: list[ExpertKey]) -> None:
        """Never called: nothing is resident."""

    def stage(self, bank: int, keys: list[ExpertKey]) -> ReadBatch | None:
        """Everything is read, every time."""
        base = self._key_base[bank]
        self.counters.lookups += len(keys)
        if bank in self.staged:
            return None
        self.staged[bank] = keys
        return self._pages[bank].reads([key - base for key in keys])

    def ahead(self, bank: int) -> ReadBatch | None:
        """All experts; the caller starts a projection's reads when its slot is free."""
        pages, base = self._pages[bank], self._key_base[bank]
        self.staged[bank] = list(range(base, base + len(pages.edges)))
        return pages.reads(range(len(pages.edges)))

    def commit(self, bank: int) -> None:
        """Slots are overwritten by the next layer; there is nothing to note."""
        self.staged.pop(bank, None)

    def abandon(self) -> None:
        """What was staged is nowhere."""
        self.staged.clear()

    def retire(self, bank: int, keys: list[ExpertKey]) -> None:
        """Nothing is kept."""

    def withhold(self) -> None:
        """Nothing is ranked."""

    def hear(self, uses: Iterable[list[ExpertKey]]) -> None:
        """Nothing is ranked."""

    def settle(self) -> None:
        """Nothing is held over any budget."""
        self.staged.clear()

    def close(self) -> None:
        """Give the slots back."""
        for region in self._regions:
            region.close()
