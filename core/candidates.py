"""From logits to candidates, and from levels of candidates to a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bmoe.drafts import Level, Proposal

if TYPE_CHECKING:
    from numpy.typing import NDArray


def likeliest(logits: NDArray[np.float32], count: int) -> Level:
    """The ``count`` likeliest tokens of a row of logits, with their probabilities; ties go to the lowest id."""
    count = min(count, len(logits))
    shifted = np.exp(logits - logits.max(), dtype=np.float64)
    if count == 1:
        best = [int(logits.argmax())]
    else:
        some = np.argpartition(-logits, count - 1)[:count]
        best = sorted(some.tolist(), key=lambda token: (-logits[token], token))
    whole = float(shifted.sum())
    return tuple((token, float(shifted[token]) / whole) for token in best)


def comb(levels: Sequence[Level], limit: int) -> Proposal:
    """A draft of up to ``limit`` tokens: the chain of the likeliest, and beside each the other candidates as leaves.

    The likeliest tokens have a place first: a chain that is cut is worth less than a leaf that is left out. Tokens come
    in the order of their depth, the likeliest of each first.
    """
    levels = levels[:limit]
    room = limit - len(levels)
    above, tokens, parents, odds = -1, list[int](), list[int](), list[float]()
    spine = 1.0
    worth: list[tuple[float, int, int]] = []
    for depth, level in enumerate(levels):
        worth += [(-spine * probability, depth, rank) for rank, (_, probability) in enumerate(level) if rank]
        spine *= level[0][1]
    chosen = {(depth, rank) for _, depth, rank in sorted(worth)[:room]}
    for depth, level in enumerate(levels):
        first = len(tokens)
        for rank, (token, probability) in enumerate(level):
            if rank == 0 or (depth, rank) in chosen:
                tokens.append(token)
                parents.append(above)
                odds.append(probability)
        above = first
    return Proposal(tuple(tokens), tuple(parents), tuple(odds))
