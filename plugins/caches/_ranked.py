"""Entries by rank, the least first: a heap whose outdated items are skipped."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable
from typing import Any

from bmoe.contracts import ExpertKey


class Ranked:
    """Ranks of entries, which may change; O(log n) to set one, and on average to find the least."""

    def __init__(self) -> None:
        self.ranks: dict[ExpertKey, Any] = {}
        self._heap: list[tuple[Any, ExpertKey]] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self.ranks

    def set(self, key: ExpertKey, rank: Any) -> None:
        """Give ``key`` a rank, or another one; ranks must be comparable, and equal ones go by key."""
        self.ranks[key] = rank
        if len(self._heap) > 64 + 4 * len(self.ranks):
            self._heap = [(each, k) for k, each in self.ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, key))

    def drop(self, key: ExpertKey) -> None:
        """Forget ``key``, if it is here."""
        self.ranks.pop(key, None)

    def least(self, pinned: Collection[ExpertKey]) -> tuple[Any, ExpertKey] | None:
        """The least rank and its key, of those that are not ``pinned``; None if there is none."""
        heap, ranks, passed = self._heap, self.ranks, []
        found = None
        while heap and found is None:
            rank, key = heap[0]
            if ranks.get(key, self) != rank:
                heapq.heappop(heap)
            elif key in pinned:
                passed.append(heapq.heappop(heap))
            else:
                found = rank, key
        for item in passed:
            heapq.heappush(heap, item)
        return found
