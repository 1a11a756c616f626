"""Replays written a second time, plainly: numpy tables of last and next use, a search for every eviction, no heap."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bmoe.contracts import ExpertKey

Touches = list[tuple[tuple[ExpertKey, ...], int, bool, bool]]
"""Keys, bytes of each, whether they count, whether the token ends."""


def naive_replay(touches: Touches, budget: int, rule: str) -> tuple[int, int, int]:
    """Look-ups, hits and missed bytes that count, by ``rule``: lru, belady (whole layer kept) or optimum."""
    names = sorted({key for keys, *_ in touches for key in keys})
    number = {key: index for index, key in enumerate(names)}
    layer = np.array([key >> 24 for key in names])
    size = np.zeros(len(names), np.int64)
    for keys, nbytes, *_ in touches:
        size[[number[key] for key in keys]] = nbytes
    resident = np.zeros(len(names), bool)
    last = np.zeros(len(names), np.int64)
    lookups = hits = missed = now = 0

    def evict(pinned: Iterable[int], limit: int, at: int) -> None:
        while size[resident].sum() > limit:
            free = resident.copy()
            free[list(pinned)] = False
            if not free.any():
                return
            rank = -last if rule == "lru" else _next_use(touches, at, names)
            resident[np.argmax(np.where(free, rank, np.iinfo(np.int64).min))] = False

    for at, (keys, nbytes, counted, ends) in enumerate(touches):
        own = [number[key] for key in keys]
        lookups += counted * len(own)
        hits += counted * int(resident[own].sum())
        missed += counted * int((~resident[own]).sum()) * nbytes
        resident[own] = True
        for index in own:
            now += 1
            last[index] = now
        evict(np.flatnonzero(layer == layer[own[0]]) if rule == "belady" else own, budget, at)
        if ends:
            evict((), budget, at)
    return lookups, hits, missed


def _next_use(touches: Touches, at: int, names: list[ExpertKey]) -> np.ndarray:
    later = touches[at + 1 :]
    return np.array([next((i for i, (keys, *_) in enumerate(later) if key in keys), len(later)) for key in names])
