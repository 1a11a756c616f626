"""The bound that no policy can pass: keep, at every moment, the entries whose next use is nearest (Belady 1966)."""

from __future__ import annotations

import heapq

from bmoe.contracts import ExpertKey
from bmoe.replay.offline import Trace, batches


def most_hits(trace: Trace, capacity: int) -> int:
    """The most hits that any policy can have on ``trace`` with room for ``capacity`` entries of equal size.

    A layer's entries are needed together, so that a capacity below the largest layer counts as that.
    """
    touches = list(batches(trace))
    room = max([capacity, *map(len, touches)])
    next_uses: list[dict[ExpertKey, int]] = []
    following: dict[ExpertKey, int] = {}
    never = len(touches)
    for index in range(len(touches) - 1, -1, -1):
        next_uses.append({key: following.get(key, never) for key in touches[index]})
        following.update(dict.fromkeys(touches[index], index))
    next_uses.reverse()

    hits = 0
    kept: dict[ExpertKey, int] = {}
    furthest: list[tuple[int, ExpertKey]] = []
    for keys, upcoming in zip(touches, next_uses, strict=True):
        hits += sum(key in kept for key in keys)
        for key, use in upcoming.items():
            kept[key] = use
            heapq.heappush(furthest, (-use, key))
        while len(kept) > room:
            use, key = heapq.heappop(furthest)
            if kept.get(key) == -use:  # else it was used again since, and has a newer place in the heap
                del kept[key]
    return hits
