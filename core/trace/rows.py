"""The two forms of a routing trace on disk: lines of ``route_trace v1``, and Parquet with probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bmoe.contracts import ModelFacts
from bmoe.replay.parquet import pyarrow, read_table
from bmoe.replay.route_trace import DRAFT_COLUMNS, Routed, RouteTrace, TraceError, columns, trace_lines
from bmoe.trace.output import TraceLines, TracePlace, report, said
from bmoe.trace.route import model_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PARQUET = ".parquet"
_HEADER = ("model", "arch", "n_layer", "n_expert", "n_used")
_GROUP = 1 << 16


class RouteLines:
    """Rows as lines; loadable after every decode. ``drafts`` adds their columns, ``head`` the layer that guesses."""

    wants_probabilities = False

    def __init__(self, place: TracePlace, facts: ModelFacts, *, drafts: bool = False, head: bool = False) -> None:
        self._lines = TraceLines(place, trace_lines(model_of(facts, drafts=drafts, head=head)))
        self._drafts, self._rows = drafts, 0

    @property
    def rows(self) -> int:
        """Rows that were written."""
        return self._lines.rows

    @property
    def failure(self) -> str:
        """Why the trace ended early, or ""."""
        return self._lines.failure

    def routing(self, rows: Sequence[Routed], probabilities: NDArray[np.float32] | None, tokens: Sequence[int]) -> None:
        """Hold the rows of one routing until the decode is complete."""
        self._rows += len(rows)
        add = self._lines.append
        for turn, phase, step, layer, slot, expert, _, residency, nbytes, number, place in rows:
            end = f",{number},{place}\n" if self._drafts else "\n"
            add(f"{turn},{phase},{step},{layer},{slot},{expert},nan,{residency},{nbytes}{end}")

    def flush(self) -> None:
        """Write them."""
        self._lines.flush(self._rows)
        self._rows = 0

    def discard(self) -> None:
        """Forget them."""
        self._lines.discard()
        self._rows = 0

    def close(self) -> None:
        """Put the file in its place."""
        self._lines.close()


class RouteParquet:
    """Rows as a Parquet table; ``probs`` is a list of every expert's probability, on the row of slot 0.

    The file is whole once it is closed, not before. Raises :class:`TraceError` without pyarrow.
    """

    wants_probabilities = True

    def __init__(self, place: TracePlace, facts: ModelFacts, *, drafts: bool = False, head: bool = False) -> None:
        arrow, parquet = pyarrow()
        self._arrow, self._place = arrow, place
        self._names = columns(drafts)
        self._schema = _schema(arrow, self._names).with_metadata(_metadata(model_of(facts, head=head)))
        self._writer: Any = parquet.ParquetWriter(place.file, self._schema, compression="zstd")
        self._held: list[tuple[Routed, Any]] = []
        self._whole = 0
        self.rows, self.failure = 0, ""

    def routing(self, rows: Sequence[Routed], probabilities: NDArray[np.float32] | None, tokens: Sequence[int]) -> None:
        """Hold the rows of one routing, with a copy of the probabilities."""
        values: list[Any] = [None] * len(rows)
        if probabilities is not None and len(probabilities) == len(tokens):
            for at, row in zip(tokens, probabilities, strict=True):
                values[at] = row.copy()
        self._held += zip(rows, values, strict=True)

    def flush(self) -> None:
        """The decode is complete; write a group of rows once there are enough."""
        self._whole = len(self._held)
        if self._whole >= _GROUP:
            self._write()

    def discard(self) -> None:
        """Forget the rows since the last flush."""
        del self._held[self._whole :]

    def close(self) -> None:
        """Write what is left and the end of the file, and put it in its place."""
        self._write()
        if self.rows and not self.failure:
            try:
                self._writer.close()
                self._place.keep()
                return
            except OSError as error:
                self._fail(error)
        with contextlib.suppress(OSError):
            self._writer.close()
        self._place.drop()

    def _write(self) -> None:
        held, self._held, self._whole = self._held[: self._whole], self._held[self._whole :], 0
        if not held or self.failure:
            return
        values: list[Any] = [list(column) for column in zip(*(row for row, _ in held), strict=True)]
        values = [*values[: len(self._names)], [value for _, value in held]]
        try:
            self._writer.write_table(self._arrow.table(values, schema=self._schema))
            self.rows += len(held)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failure = said(self._place, error, 0)
        report(self._place.path, self.failure, None)


def read_parquet(path: str) -> RouteTrace:
    """A routing trace in Parquet, without its probabilities. Raises :class:`TraceError`."""
    head, table = read_table(path, list(Routed._fields))
    drafts = all(name in table.schema.names for name in DRAFT_COLUMNS)
    names = columns(drafts)
    try:
        rows = [Routed(*row) for row in zip(*(table.column(name).to_pylist() for name in names), strict=True)]
    except (KeyError, ValueError, TypeError) as error:
        raise TraceError(f"{path}: is no routing trace in Parquet that was closed; record it again") from error
    return RouteTrace(head.model, head.arch, head.n_layer, head.n_expert, head.n_used, head.layers, rows, drafts)


def _metadata(trace: RouteTrace) -> Mapping[str, str]:
    layers = " ".join(f"{layer}:{size.expert_bytes}:{size.dense_bytes}" for layer, size in sorted(trace.layers.items()))
    facts: Iterable[tuple[str, Any]] = ((key, getattr(trace, key)) for key in _HEADER)
    return {"format": "route_trace v1", **{key: str(value) for key, value in facts}, "layers": layers}


def _schema(arrow: Any, names: Sequence[str]) -> Any:
    kinds: tuple[Any, ...] = (arrow.int32(), arrow.int8(), arrow.int64(), arrow.int32(), arrow.int32(), arrow.int32())
    kinds += (arrow.float32(), arrow.int8(), arrow.int64(), arrow.int32(), arrow.int32())
    fields = list(zip(names, kinds[: len(names)], strict=True))
    return arrow.schema([*fields, ("probs", arrow.list_(arrow.float32()))])
