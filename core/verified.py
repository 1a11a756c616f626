"""The routings of a verify batch, kept until it is known which of its tokens are a part of the text.

A cache policy hears of those alone, token after token and layer by layer, as if each had been decoded by itself; what
only rejected tokens used was read for nothing. Source of the rule: docs/explanation/drafting.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bmoe.contracts import BatchContext, ExpertKey, Observer, RoutingEvent
from bmoe.native.evalhook import Seam
from bmoe.sight import Sight, of_rows
from bmoe.store import Store

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
    """Between a stream and its cache: what is ranked at once, and what waits for :meth:`accepted`.

    ``observer`` is a cache policy that wants to see routings, each before its entries are ranked. With ``hears_all``
    the cache hears of rejected tokens as of any others, for comparison.
    """

    def __init__(self, seam: Seam, store: Store, observer: Observer | None) -> None:
        self.hears_all = False
        self._seam, self._store, self._observer = seam, store, observer
        self._held: list[Held] = []
        self._waits = self._holds = False

    def begin(self, batch: BatchContext) -> None:
        """Before a decode of these tokens. A verify batch before it that was not accepted was not of the text."""
        self._held.clear()
        if self._waits:
            self._store.hear(())
        self._holds = batch.phase == "verify"
        self._waits = self._holds and not self.hears_all
        if self._waits:
            self._store.withhold()

    def show(self, look: Callable[[], Sight]) -> None:
        """Show a routing to the observer, unless its tokens may be rejected."""
        if self._observer is not None and not self._waits:
            self._observer.observe(look().event(self._observer.wants))

    def hold(self, bank: int, look: Callable[[], Sight]) -> None:
        """Keep a routing, whose entries are staged, until it is known which of its tokens are accepted."""
        if not self._holds:
            return
        sight, observer = look(), self._observer if self._waits else None
        event = None if observer is None else _copied(sight.event(observer.wants))
        read = frozenset(self._store.staged.get(bank, ()))
        self._held.append(Held(bank, self._seam.key_base[bank], sight.ids.copy(), sight.rows, read, event))

    def accepted(self, kept: Sequence[int]) -> int:
        """Of the verify batch the tokens ``kept`` are text; the bytes that were read for others alone."""
        if self._waits:
            self._store.hear(self._uses(kept))
        wasted, chosen = 0, set(kept)
        for held in self._held:
            rows = [row for row, token in enumerate(held.rows) if token in chosen]
            used = {held.key_base + expert for expert in held.ids[rows].ravel().tolist()}
            wasted += len(held.read - used) * self._seam.banks[held.bank].entry_bytes
        self._held.clear()
        self._holds = self._waits = False
        return wasted

    def _uses(self, kept: Sequence[int]) -> Iterator[list[ExpertKey]]:
        """What each of the tokens ``kept`` used in each routing, best slot first, token after token."""
        for token in kept:
            for held in self._held:
                if token not in held.rows:
                    continue
                row = held.rows.index(token)
                if held.event is not None and self._observer is not None:
                    self._observer.observe(_row(held.event, row))
                yield [held.key_base + expert for expert in dict.fromkeys(held.ids[row].tolist())]


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
