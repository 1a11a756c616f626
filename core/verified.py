"""The routings of a verify batch, kept until it is known which of its tokens are a part of the text.

A cache policy hears of those alone, token after token and layer by layer, as if each had been decoded by itself; what
only rejected tokens used was read for nothing. Source of the rule: docs/explanation/drafting.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bmoe.contracts import ExpertKey, RoutingEvent
from bmoe.sight import Sight, of_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Held:
    """One routing: ``ids`` int32 [n_rows, n_used], of the tokens ``rows`` of the batch, and the keys ``read`` for it.

    ``event`` is what an observer would have been shown, with arrays of its own.
    """

    bank: int
    key_base: int
    ids: NDArray[np.int32]
    rows: Sequence[int]
    read: frozenset[ExpertKey]
    event: RoutingEvent | None


class Verified:
    """Gathers the routings of one batch, in the order in which they were computed."""

    def __init__(self) -> None:
        self._held: list[Held] = []

    def add(
        self, bank: int, key_base: int, sight: Sight, read: Sequence[ExpertKey], wants: frozenset[str] | None
    ) -> None:
        """A routing was handled; ``wants`` is what an observer looks at, None without one."""
        event = None if wants is None else _copied(sight.event(wants))
        self._held.append(Held(bank, key_base, sight.ids.copy(), sight.rows, frozenset(read), event))

    def unread(self, kept: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Bank, and how many entries were read in it that none of the tokens ``kept`` uses."""
        chosen = set(kept)
        for held in self._held:
            rows = [row for row, token in enumerate(held.rows) if token in chosen]
            used = {held.key_base + expert for expert in held.ids[rows].ravel().tolist()}
            yield held.bank, len(held.read - used)

    def uses(self, kept: Sequence[int]) -> Iterator[tuple[list[ExpertKey], RoutingEvent | None]]:
        """What each of the tokens ``kept`` used in each routing, best slot first, token after token."""
        for token in kept:
            for held in self._held:
                if token in held.rows:
                    row = held.rows.index(token)
                    keys = [held.key_base + expert for expert in dict.fromkeys(held.ids[row].tolist())]
                    yield keys, None if held.event is None else _row(held.event, row)


_COLUMNS = ("ids", "probs", "scores", "activation", "own")


def _copied(event: RoutingEvent) -> RoutingEvent:
    """The event with arrays that outlive llama.cpp's."""
    columns = {name: getattr(event, name) for name in _COLUMNS}
    changed: dict[str, Any] = {name: None if column is None else column.copy() for name, column in columns.items()}
    return replace(event, **changed)


def _row(event: RoutingEvent, row: int) -> RoutingEvent:
    """The event of one token, as of a decode of its own."""
    columns = {name: getattr(event, name) for name in _COLUMNS}
    one: dict[str, Any] = {name: None if column is None else column[row : row + 1] for name, column in columns.items()}
    return replace(event, batch=of_rows(event.batch, [row]), **one)
