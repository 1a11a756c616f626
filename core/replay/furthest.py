"""Belady's rule on a trace in columns, under a budget in bytes: what is used again latest goes first."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from bmoe.contracts import ExpertKey
from bmoe.replay.lookups import Lookups
from bmoe.replay.play import Played

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KEY_BITS = 40  # an ExpertKey has no more; a heap of plain ints is a third of one of tuples
_KEY_MASK = (1 << _KEY_BITS) - 1
_SLACK = 1 << 12


def play_belady(trace: Lookups, budget_bytes: int, *, whole_layer: bool = True) -> Played:
    """Replay ``trace`` as :func:`bmoe.replay.play.play` does, with knowledge of every use to come.

    Whatever is read is admitted. ``whole_layer``: the entries of a layer are all kept while one of its routings is in
    flight, as in the published figures; without it only those of the routing itself are, as in the engine, and with
    entries of equal size no policy has more hits.
    """
    upcoming = _next_touch(trace)
    kept: dict[ExpertKey, int] = {}
    furthest: list[int] = []
    held = lookups = hits = missed_bytes = begin = 0
    sizes = trace.entry_bytes

    def shrink(pinned: frozenset[ExpertKey], layer: int) -> None:
        nonlocal held
        aside = []
        while held > budget_bytes and furthest:
            item = heapq.heappop(furthest)
            key = item & _KEY_MASK
            if kept.get(key) != -(item >> _KEY_BITS):
                continue  # it was used since, and has a newer place in the heap, or is gone
            if key in pinned or key >> 24 == layer:
                aside.append(item)
                continue
            del kept[key]
            held -= sizes[key >> 24]
        for item in aside:
            heapq.heappush(furthest, item)

    for keys, size, counted, ends_token, _, draft in trace.touches():
        missed = 0
        following = upcoming[begin : begin + len(keys)].tolist()
        begin += len(keys)
        for key, use in zip(keys, following, strict=True):
            missed += key not in kept
            kept[key] = use
            heapq.heappush(furthest, -use << _KEY_BITS | key)
        if counted:
            lookups += len(keys)
            hits += len(keys) - missed
        missed_bytes += missed * size if counted or draft is not None else 0
        held += missed * size
        if held > budget_bytes:
            shrink(frozenset(keys), keys[0] >> 24 if whole_layer else -1)
        if ends_token and held > budget_bytes:
            shrink(frozenset(), -1)
        if len(furthest) > 4 * len(kept) + _SLACK:
            furthest = [-use << _KEY_BITS | key for key, use in kept.items()]
            heapq.heapify(furthest)
    return Played(lookups, hits, missed_bytes)


def _next_touch(trace: Lookups) -> NDArray[np.int64]:
    """Of every look-up, the number of the touch that uses the same entry next; the count of touches if none does."""
    keys = trace.keys
    touch = np.repeat(np.arange(len(trace.counted)), np.diff(trace.starts))
    order = np.argsort(keys, kind="stable")
    upcoming = np.full(len(keys), len(trace.counted), np.int64)
    again = keys[order[1:]] == keys[order[:-1]]
    upcoming[order[:-1][again]] = touch[order[1:][again]]
    return upcoming
