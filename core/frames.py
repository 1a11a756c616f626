"""The pages that cached experts hold: counted within a budget, moved from one entry to the next, given back.

An expert's place is fixed by its number. An evicted entry's pages are moved under the newcomer, since freeing, faulting
and zeroing pages costs more than reading them. (Huge pages would hold the neighbours of an entry as well; taken from
elsewhere and moved in parts, they made matmuls slower, so that small pages it is.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from bmoe.native import memory
from bmoe.pages import BankPages

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Page-aligned (address, bytes), one per projection."""


class Frames:
    """Which pages are held, in pages of ``memory.PAGE``; those at the edges of two neighbours are counted once.

    ``recycled`` counts slices whose memory was moved to them from an evicted entry.
    """

    def __init__(self, budget: int, slices: int, max_mappings: int | None) -> None:
        """``budget`` and ``held`` in pages; ``slices``: how many there are in all; ``max_mappings``: None = no limit.

        A moved range is a mapping of its own and splits the one around it, so that near the limit nothing is moved.
        """
        self.recycled = 0
        self.held = 0
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
        """Count an entry's pages, and bring to it those of an evicted entry; what it lacks comes when it is written."""
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
        if donor:
            self._take_over(donor, pages.interior[expert])

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
        self.held = 0
        self._edge_users.clear()
        self._idle_edges.clear()

    @staticmethod
    def give_back(spans: Spans) -> None:
        """Return the pages of an evicted entry to the system."""
        for address, size in spans:
            memory.release(address, size)

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
