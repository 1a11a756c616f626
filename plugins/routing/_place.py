"""Puts chosen experts into a token's slots: one that stays keeps its slot, the others follow in their order."""

from __future__ import annotations

from collections.abc import Sequence


def place(own: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """``own``'s slots with the experts of ``chosen``, which are as many and all different."""
    coming = iter([expert for expert in chosen if expert not in own])
    kept = set(chosen)
    return [expert if expert in kept else next(coming) for expert in own]
