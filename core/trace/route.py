"""The routing trace of a run: what each token was routed to, in ``route_trace v1`` or Parquet."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from bmoe.contracts import BatchContext, ExpertKey, ModelFacts
from bmoe.native import tensor
from bmoe.replay.route_trace import (
    ACCEPTED,
    CODES,
    HIT,
    MISS,
    REJECTED,
    SPECULATED,
    LayerBytes,
    Routed,
    RouteTrace,
    trace_of,
)
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

    Routings of a verify batch wait until it is known which of its tokens were accepted. A round is a verify batch with
    the decodes that made its draft, or such decodes alone if nothing came of them.
    """

    def __init__(self, stream: Stream, out: RouteRows) -> None:
        self._stream, self._out = stream, out
        self._batch = BatchContext("decode", ())
        self._turn, self._next = -1, -1
        self._waiting: list[tuple[list[Routed], NDArray[np.float32] | None, list[int]]] = []
        self._round, self._rounds = -1, 0
        self._drafted: dict[str, int] = {}

    def begin(self, batch: BatchContext) -> None:
        """A decode of these tokens begins."""
        self._batch = batch
        self._waiting.clear()
        self._round = self._round_of(batch)
        if batch.phase != "draft" and batch.positions and (self._turn < 0 or batch.positions[0] != self._next):
            self._turn += 1

    def routing(self, bank: int, keys: Sequence[ExpertKey]) -> None:
        """Note a routing, before anything is read for it."""
        stream, out = self._stream, self._out
        seam = stream.seam
        facts = seam.banks[bank]
        chosen = tensor.matrix_i32(seam.node).tolist()
        steps = _steps(self._batch, len(chosen))
        places = rows_of(self._batch, len(chosen))
        verifies = self._batch.phase == "verify"
        phase = REJECTED if verifies else CODES[self._batch.phase]
        turn, number = self._turn, self._round
        entry, base, size = seam.entry_base[bank], seam.key_base[bank], facts.entry_bytes
        ahead = _read_ahead(stream, bank)
        rows: list[Routed] = []
        starts: list[int] = []
        seen: set[int] = set()
        for step, place, experts in zip(steps, places, chosen, strict=True):
            starts.append(len(rows))
            for slot, expert in enumerate(experts):
                hit = seam.resident[entry + expert]
                residency = HIT if hit else SPECULATED if base + expert in ahead else MISS
                nbytes = 0 if hit or expert in seen else size
                seen.add(expert)
                row = (turn, phase, step, facts.layer, slot, expert, math.nan, residency, nbytes, number, place)
                rows.append(Routed(*row))
        found = None
        if out.wants_probabilities:
            found = stream.sight(bank).probs
        if verifies:
            self._waiting.append((rows, None if found is None else found.copy(), starts))
        else:
            out.routing(rows, found, starts)

    def handled(self, bank: int) -> None:
        """Nothing is noted afterwards."""

    def end(self, complete: bool) -> None:
        """The decode ended."""
        if not complete:
            self._out.discard()
            return
        if self._batch.phase == "verify":
            return
        if self._batch.positions and self._batch.phase != "draft":
            self._next = self._batch.positions[-1] + 1
        self._out.flush()

    def accepted(self, kept: Sequence[int]) -> None:
        """Write the routings of the batch, now that it is known whose they are."""
        chosen = set(kept)
        for rows, found, starts in self._waiting:
            said = [row._replace(phase=ACCEPTED) if row.place in chosen else row for row in rows]
            self._out.routing(said, found, starts)
        self._waiting.clear()
        self._next = self._batch.positions[kept[-1]] + 1
        self._out.flush()

    def _round_of(self, batch: BatchContext) -> int:
        """The number of the round that a decode belongs to, -1 if to none."""
        drafted = self._drafted.pop(batch.request_id, None)
        if batch.phase not in ("draft", "verify"):
            return -1
        if drafted is None:
            drafted, self._rounds = self._rounds, self._rounds + 1
        if batch.phase == "draft":
            self._drafted[batch.request_id] = drafted
        return drafted


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


def model_of(facts: ModelFacts, *, drafts: bool = False, head: bool = False) -> RouteTrace:
    """What a trace says about the model, without rows; the place of the file is nobody's business."""
    trace = trace_of(facts, (), head=head)
    layers = {layer: LayerBytes(*size) for layer, size in trace.layers.items()}
    return replace(trace, layers=layers, drafts=drafts)
