"""Records what an engine routes to: a stand-in before its store notes each routing and passes it on.

Nothing is added to the way that tokens take otherwise. Weights are not seen from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from bmoe.contracts import ExpertKey, ReadBatch, key_parts
from bmoe.engine import Engine
from bmoe.errors import NativeError
from bmoe.replay.route_trace import DECODE, HIT, MISS, Routed
from bmoe.store import Store


def record_routes(engine: Engine, tokens: Sequence[int], turn: int = 0) -> list[Routed]:
    """Decode ``tokens`` one by one in a conversation of its own; return what every one was routed to.

    One by one, because a wider decode shows the union of its tokens' experts, and only some of them in the last layer.
    Residency and bytes are those of this engine's cache. Raises NativeError if the engine does not stream.
    """
    stream = engine.stream
    if stream is None:
        raise NativeError(f"{engine.facts.path}: nothing is streamed, so no routing is seen; set stream.enabled = true")
    recorder = _Recorder(engine, stream.store, turn)
    stream.store = cast(Store, recorder)
    try:
        with engine.conversation() as conversation:
            for step, token in enumerate(tokens):
                recorder.step = step
                conversation.feed([token])
    finally:
        stream.store = recorder.inner
    return recorder.rows


class _Recorder:
    """A store to its stream. Everything but the two calls that name a routing is the store's own."""

    def __init__(self, engine: Engine, inner: Store, turn: int) -> None:
        self.inner, self.step, self.rows = inner, 0, list[Routed]()
        self._turn = turn
        self._banks = {(b.layer, b.bank): (i, b.entry_bytes) for i, b in enumerate(engine.plan.banks)}
        self._resident, self._base = engine.seam.resident, engine.seam.entry_base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def touched(self, keys: list[ExpertKey]) -> None:
        """A routing that was all hits."""
        self._note(keys)
        self.inner.touched(keys)

    def stage(self, bank: int, keys: list[ExpertKey]) -> ReadBatch | None:
        """A routing with a miss; what is resident is noted before the store changes it."""
        self._note(keys)
        return self.inner.stage(bank, keys)

    def _note(self, keys: Sequence[ExpertKey]) -> None:
        for slot, key in enumerate(keys):
            layer, bank, expert = key_parts(key)
            index, entry_bytes = self._banks[layer, bank]
            hit = bool(self._resident[self._base[index] + expert])
            row = (self._turn, DECODE, self.step, layer, slot, expert, math.nan)
            self.rows.append(Routed(*row, HIT if hit else MISS, 0 if hit else entry_bytes))
