"""The pages that cached experts hold: counted within a budget, moved from one entry to the next, given back.

An expert's place is fixed by its number, and its neighbours may not be cached: huge pages at that place would hold them
too. So memory is taken from the system in huge pages elsewhere, and its page table entries are moved to where it is
needed. The pages stay physically contiguous: a direct read goes into few long segments, and a matmul misses the TLB
less. From then on an evicted entry's pages are moved under the newcomer, because freeing, faulting and zeroing pages
costs more than reading them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from bmoe.native import memory
from bmoe.pages import BankPages

CHUNK = 2 << 20
"""Bytes that the pool takes from the system at a time: a huge page on x86-64, and on aarch64 with pages of 4 KiB."""
_LEAST_POOL = 32 * CHUNK
_LEAST_SPAN = 16 * memory.PAGE

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Page-aligned (address, bytes), one per projection."""


class FramePool:
    """Memory in long pieces, taken from the system as it is needed; its addresses are used round and round."""

    def __init__(self, nbytes: int) -> None:
        self._region = memory.reserve(nbytes + CHUNK, huge=True)
        self._begin = -(-self._region.address // CHUNK) * CHUNK
        self._end = self._begin + nbytes // CHUNK * CHUNK
        self._next = self._ready = self._begin

    @property
    def idle_bytes(self) -> int:
        """Bytes that the pool holds and no entry has yet."""
        return self._ready - self._next

    def give(self, address: int, nbytes: int, room: int) -> bool:
        """Move ``nbytes`` of memory to ``address``; False, having moved nothing, if that cannot be.

        ``room``: how many bytes more the pool may hold in the end.
        """
        if nbytes > self.idle_bytes and not self._refill(nbytes, room):
            return False
        if not memory.recycle(self._next, address, nbytes):
            return False
        self._next += nbytes
        return True

    def close(self) -> None:
        """Give back what no entry has. May be called twice."""
        self._region.close()
        self._next = self._ready = self._end = self._begin

    def _refill(self, nbytes: int, room: int) -> bool:
        start = self._ready
        if self._next + nbytes > self._end:
            memory.release(self._next, self.idle_bytes)
            start = self._next = self._ready = self._begin
        more = -(-(self._next + nbytes - start) // CHUNK) * CHUNK
        if start + more > self._end or self.idle_bytes + more - nbytes > room:
            return False
        if not memory.populate(start, more):
            return False
        self._ready = start + more
        return True


class Frames:
    """Which pages are held, in pages of ``memory.PAGE``. Entries of one bank may share the pages at their edges.

    ``recycled`` counts slices whose memory was moved to them from an evicted entry.
    """

    def __init__(self, budget: int, slices: int, max_mappings: int | None, *, pooled: bool) -> None:
        """``budget`` in pages; ``slices``: how many there are in all; ``max_mappings``: None = no limit.

        A moved range is a mapping of its own and splits the one around it, so that near the limit nothing is moved.
        """
        self.recycled = 0
        self._entries = 0
        self._edge_users: dict[int, int] = {}
        self._idle_edges: dict[int, None] = {}
        self._moved: set[int] = set()
        self._move_limit = slices
        if max_mappings is not None:
            self._move_limit = max(0, (max_mappings - memory.count_mappings() - 2048) // 2)
        nbytes = budget * memory.PAGE
        self._pool = FramePool(nbytes) if pooled and nbytes >= _LEAST_POOL else None
        self.budget = budget

    @property
    def held(self) -> int:
        """Pages held: of entries, edges that two neighbours share counted once, and what waits to be used again."""
        return self._entries + (self._pool.idle_bytes // memory.PAGE if self._pool is not None else 0)

    @property
    def crowded(self) -> bool:
        """Whether so many edge pages without a user are held that they should be swept rather than entries evicted."""
        return len(self._idle_edges) > max(16, self.budget // 128)

    def occupy(self, pages: BankPages, expert: int, donor: Spans) -> None:
        """Count an entry's pages, and bring memory to it: of an evicted entry (``donor``), else from the pool."""
        self._entries += pages.interior_pages[expert]
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
                self._entries += 1
        target = pages.interior[expert]
        if donor:
            self._take_over(donor, target)
        elif self._pool is not None:
            self._draw(self._pool, target)

    def vacate(self, pages: BankPages, expert: int) -> Spans:
        """Count an entry out; its interior spans, still holding memory, are the caller's to give on or give back."""
        self._entries -= pages.interior_pages[expert]
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
        self._entries -= len(self._idle_edges)
        swept = bool(self._idle_edges)
        self._idle_edges.clear()
        return swept

    def dissolve_pool(self) -> bool:
        """Give back what the pool holds; entries keep what they have. False if there was nothing."""
        held = self._pool is not None and self._pool.idle_bytes > 0
        self.close()
        return held

    def forget_all(self) -> None:
        """Count from nothing: the caller has released every region."""
        self._entries = 0
        self._edge_users.clear()
        self._idle_edges.clear()

    def close(self) -> None:
        """Give the pool back; entries keep what they have. May be called twice."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

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

    def _draw(self, pool: FramePool, target: Spans) -> None:
        for address, wanted in target:
            if wanted >= _LEAST_SPAN and self._may_move(address):
                room = (self.budget - self._entries) * memory.PAGE
                if pool.give(address, wanted, room):
                    self._moved.add(address)
