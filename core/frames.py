"""The pages that cached experts hold: counted within a budget, moved from one entry to the next, given back.

An expert's place is fixed by its number. An evicted entry's pages are moved under the newcomer, since freeing, faulting
and zeroing pages costs more than reading them. (Huge pages would hold the neighbours of an entry as well; taken from
elsewhere and moved in parts, they made matmuls slower, so that small pages it is.)
"""

from __future__ import annotations

from typing import TypeAlias

from bmoe.native import memory
from bmoe.pages import BankPages

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Page-aligned (address, bytes), one per projection."""


class Frames:
    """Which pages are held, in pages of ``memory.PAGE``; those at the edges of two neighbours are counted once.

    ``recycled`` counts slices whose memory was moved to them from an evicted entry. ``spare`` pages, at most
    ``spare_limit``, are those of evicted entries that wait for a newcomer; they lie where they were.
    """

    def __init__(self, budget: int, slices: int, max_mappings: int | None) -> None:
        """``budget`` and ``held`` in pages; ``slices``: how many there are in all; ``max_mappings``: None = no limit.

        A moved range is a mapping of its own and splits the one around it, so that near the limit nothing is moved.
        """
        self.recycled = 0
        self.held = self.spare = self.spare_limit = 0
        self._spares: dict[Spans, None] = {}
        self._edge_users: dict[int, int] = {}
        self._idle_edges: dict[int, None] = {}
        self._moved: set[int] = set()
        self._move_limit = slices
        if max_mappings is not None:
            self._move_limit = max(0, (max_mappings - memory.count_mappings() - 2048) // 2)
        self.budget = budget

    @property
    def crowded(self) -> bool:
        """Whether so many edge pages without a user are held that they should be swept rather than entries evicted."""
        return len(self._idle_edges) > max(16, self.budget // 128)

    def occupy(self, pages: BankPages, expert: int, donor: Spans) -> None:
        """Count an entry's pages, and bring to it those of an evicted entry, ``donor`` or a spare.

        What it lacks comes when it is written.
        """
        self.held += pages.interior_pages[expert]
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
                self.held += 1
        target = pages.interior[expert]
        if self._spares:
            if self.unspare(target):  # its own pages are there still
                self.give_back(donor)
                return
            donor = donor or self.unspare()
        if donor:
            self._take_over(donor, target)

    def vacate(self, pages: BankPages, expert: int) -> Spans:
        """Count an entry out; its interior spans, still holding memory, are the caller's to give on or give back."""
        self.held -= pages.interior_pages[expert]
        users = self._edge_users
        for page in pages.edges[expert]:
            count = users[page]
            if count > 1:
                users[page] = count - 1
            else:
                del users[page]
                self._idle_edges[page] = None
        return pages.interior[expert]

    def sweep(self) -> bool:
        """Return edge pages without a user, kept since a neighbour often comes back to them; False if there is none."""
        for page in self._idle_edges:
            memory.release(page, memory.PAGE)
        self.held -= len(self._idle_edges)
        swept = bool(self._idle_edges)
        self._idle_edges.clear()
        return swept

    def forget_all(self) -> None:
        """Count from nothing: the caller has released every region."""
        self.held = self.spare = 0
        self._spares.clear()
        self._edge_users.clear()
        self._idle_edges.clear()

    def give_back(self, spans: Spans) -> None:
        """Return the pages of an evicted entry to the system, or keep them as spares."""
        pages = _pages(spans)
        if pages and self.spare + pages <= self.spare_limit:
            self._spares[spans] = None
            self.spare += pages
            return
        for address, size in spans:
            memory.release(address, size)

    def keep_spares(self, limit: int) -> None:
        """Set ``spare_limit``, in pages, and return what is over it."""
        self.spare_limit = limit
        while self.spare > limit:
            for address, size in self.unspare():
                memory.release(address, size)

    def unspare(self, wanted: Spans = ()) -> Spans:
        """Take back the spare of these spans, or any if none are given; empty if there is none."""
        spans = wanted or next(iter(self._spares), ())
        if spans not in self._spares:
            return ()
        del self._spares[spans]
        self.spare -= _pages(spans)
        return spans

    def _may_move(self, address: int) -> bool:
        return address in self._moved or len(self._moved) < self._move_limit

    def _take_over(self, donor: Spans, target: Spans) -> None:
        for index, (source, size) in enumerate(donor):
            address, wanted = target[index] if index < len(target) else (0, 0)
            moved = min(size, wanted)
            if moved and self._may_move(address):
                self._moved.add(address)
                if memory.recycle(source, address, moved):
                    self.recycled += 1
                else:
                    moved = 0
            else:
                moved = 0
            memory.release(source + moved, size - moved)


def _pages(spans: Spans) -> int:
    return sum(size for _, size in spans) // memory.PAGE
