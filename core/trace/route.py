"""The routing trace of a run: what each token was routed to, in ``route_trace v1`` or Parquet."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from bmoe.contracts import BatchContext, ExpertKey, ModelFacts
from bmoe.native import tensor
from bmoe.replay.route_trace import DECODE, HIT, MISS, PREFILL, SPECULATED, LayerBytes, Routed, RouteTrace, trace_of
from bmoe.sight import rows_of
from bmoe.stream import Stream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RouteRows(Protocol):
    """Where rows of routings go."""

    wants_probabilities: bool

    def routing(self, rows: Sequence[Routed], probabilities: NDArray[np.float32] | None, tokens: Sequence[int]) -> None:
        """Rows of one routing; ``probabilities`` [n_tokens, n_expert], ``tokens`` the row number where each begins."""

    def flush(self) -> None:
        """A decode is complete."""

    def discard(self) -> None:
        """The decode in progress failed: its rows are of no token."""

    def close(self) -> None:
        """Nothing comes any more."""


class RouteTracer:
    """Watches a stream. A turn is a row of positions that follow each other, as of one conversation that goes on.

    Routings of a verify batch wait until it is known which of its tokens were accepted; guesses are of no text.
    """

    def __init__(self, stream: Stream, out: RouteRows) -> None:
        self._stream, self._out = stream, out
        self._batch = BatchContext("decode", ())
        self._turn, self._next = -1, -1
        self._waiting: list[tuple[list[Routed], NDArray[np.float32] | None, list[int], list[int]]] = []

    def begin(self, batch: BatchContext) -> None:
        """A decode of these tokens begins."""
        self._batch = batch
        self._waiting.clear()
        if batch.phase != "draft" and batch.positions and (self._turn < 0 or batch.positions[0] != self._next):
            self._turn += 1

    def routing(self, bank: int, keys: Sequence[ExpertKey]) -> None:
        """Note a routing, before anything is read for it."""
        if self._batch.phase == "draft":
            return
        stream, out = self._stream, self._out
        seam = stream.seam
        facts = seam.banks[bank]
        chosen = tensor.matrix_i32(seam.node).tolist()
        steps = _steps(self._batch, len(chosen))
        phase = PREFILL if self._batch.phase == "prefill" else DECODE
        entry, base, size = seam.entry_base[bank], seam.key_base[bank], facts.entry_bytes
        ahead = _read_ahead(stream, bank)
        rows: list[Routed] = []
        starts: list[int] = []
        seen: set[int] = set()
        for step, experts in zip(steps, chosen, strict=True):
            starts.append(len(rows))
            for slot, expert in enumerate(experts):
                hit = seam.resident[entry + expert]
                residency = HIT if hit else SPECULATED if base + expert in ahead else MISS
                nbytes = 0 if hit or expert in seen else size
                seen.add(expert)
                rows.append(Routed(self._turn, phase, step, facts.layer, slot, expert, math.nan, residency, nbytes))
        found = None
        if out.wants_probabilities:
            found = stream.sight(bank).probs
        if self._batch.phase == "verify":
            found = None if found is None else found.copy()
            self._waiting.append((rows, found, starts, rows_of(self._batch, len(chosen))))
        else:
            out.routing(rows, found, starts)

    def handled(self, bank: int) -> None:
        """Nothing is noted afterwards."""

    def end(self, complete: bool) -> None:
        """The decode ended."""
        if not complete:
            self._out.discard()
            return
        if self._batch.phase in ("draft", "verify"):
            return
        if self._batch.positions:
            self._next = self._batch.positions[-1] + 1
        self._out.flush()

    def accepted(self, kept: Sequence[int]) -> None:
        """Write the routings of the tokens that were accepted."""
        for rows, found, starts, places in self._waiting:
            mine, begins, order = list[Routed](), list[int](), list[int]()
            for row, place in enumerate(places):
                if place in kept:
                    begins.append(len(mine))
                    order.append(row)
                    mine += rows[starts[row] : [*starts, len(rows)][row + 1]]
            self._out.routing(mine, None if found is None else found[order], begins)
        self._waiting.clear()
        self._next = self._batch.positions[kept[-1]] + 1
        self._out.flush()


def _steps(batch: BatchContext, rows: int) -> Sequence[int]:
    """Positions of the tokens that a routing has: all, or those whose logits were asked for; -1 if it is neither."""
    if rows == len(batch.positions):
        return batch.positions
    outputs = [at for at, wanted in zip(batch.positions, batch.is_output, strict=False) if wanted]
    return outputs if rows == len(outputs) else [-1] * rows


def _read_ahead(stream: Stream, bank: int) -> Collection[ExpertKey]:
    """Keys whose reads began before their layer was routed: guesses, and a prompt's next layer."""
    guesses = getattr(stream.store, "guesses", ())
    staged = stream.store.staged.get(bank, ())
    return {*guesses, *staged} if guesses or staged else ()


def model_of(facts: ModelFacts) -> RouteTrace:
    """What a trace says about the model, without rows; the place of the file is nobody's business."""
    trace = trace_of(facts, ())
    layers = {layer: LayerBytes(*size) for layer, size in trace.layers.items()}
    return replace(trace, layers=layers)
