"""In which order the sides are measured, so that a drift of the machine reaches all of them alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One measurement: the ``round`` that it belongs to, the number of its ``side``, the number of its ``prompt``."""

    round: int
    side: int
    prompt: int


def schedule(sides: int, rounds: int, prompts: int) -> Iterator[Turn]:
    """Every side once a round, all with the same prompt; A B, then B A, with more sides another one first each time.

    In two rounds that follow each other every side has the same mean place, so a drift that is steady cancels; in
    ``2 * sides`` rounds each side had each place twice.
    """
    for index in range(rounds):
        first = (index // 2) % sides
        order = [(first + place) % sides for place in range(sides)]
        for side in reversed(order) if index % 2 else order:
            yield Turn(index, side, index % prompts)
