"""Reads a routing trace of any length into columns, lines or Parquet, and says where it is wrong."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, TextIO

import numpy as np

from bmoe.contracts import ModelFacts
from bmoe.replay.lookups import Lookups, in_columns
from bmoe.replay.parquet import COLUMNS, MAGIC, Head, lookup_columns, parquet_lookups, refuse_unplaced
from bmoe.replay.route_trace import DECODE, VERSION, RouteTrace, TraceError, parse_trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LAYER, _EXPERT = 3, 5
_CHUNK = 1 << 18
_LINE = 1 << 12
_HEADER_LINES = 1 << 16
_MOST_BYTES = 1 << 40
_MOST = 1 << 16  # of layers and of experts, each of which has 16 bits of an ExpertKey


def read_lookups(path: str | os.PathLike[str], model: ModelFacts | None = None) -> Lookups:
    """The trace in the file ``path``; sizes of entries are those of its header, or of ``model`` if it is given.

    Raises :class:`TraceError` if it cannot be read, is no trace, has no decode row, or does not say how large an entry
    of a layer is. A file in Parquet has the router's probabilities as well.
    """
    try:
        with open(path, "rb") as begin:
            packed = begin.read(len(MAGIC)) == MAGIC
        if packed:
            head, trace = parquet_lookups(os.fspath(path))
            return _checked(trace, head, model)
        with open(path, encoding="utf-8", newline="") as file:
            return _File(os.fspath(path), file).lookups(model)
    except (OSError, ValueError) as error:  # a ValueError is undecodable text, or a path with a NUL
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise TraceError(f"{path}: cannot be read ({reason}); name a file of {VERSION}") from error


class _File:
    def __init__(self, path: str, file: TextIO) -> None:
        self._path, self._file = path, file
        self._head: RouteTrace
        self._names: list[str] = []

    def lookups(self, model: ModelFacts | None) -> Lookups:
        first = self._read_head()
        chunks = list(self._chunks(first))
        rows = np.concatenate(chunks) if chunks else np.empty((0, len(COLUMNS)), np.int32)
        del chunks
        refuse_unplaced(self._path, rows)
        head = self._head
        sizes = {layer: size.expert_bytes for layer, size in head.layers.items()}
        trace = in_columns(
            rows,
            decode=DECODE,
            source=self._path,
            model=head.model,
            arch=head.arch,
            n_layer=head.n_layer,
            n_expert=head.n_expert,
            n_used=head.n_used,
            entry_bytes=sizes,
        )
        return _checked(trace, head, model)

    def _read_head(self) -> int:
        """Read up to the names of the columns; the number of the first line after them."""
        lines: list[str] = []
        while len(lines) < _HEADER_LINES:
            line = self._file.readline(_LINE)
            lines.append(line.rstrip("\r\n"))
            # what is no trace is told by its first line, however long the file
            if not line.startswith("#") or (len(lines) == 1 and lines[0].strip() != f"# {VERSION}"):
                break
        self._head = parse_trace(self._path, lines)
        self._names = lines[-1].split(",")
        for what, count in (("n_layer", self._head.n_layer), ("n_expert", self._head.n_expert)):
            if not 0 < count <= _MOST:
                self._fail(2, f"says {what}={count}", f"it must be from 1 to {_MOST}")
        return len(lines) + 1

    def _chunks(self, number: int) -> Iterator[NDArray[np.int32]]:
        places = [self._names.index(name) for name in lookup_columns(self._names)]
        while lines := list(itertools.islice(self._file, _CHUNK)):
            rows = self._parsed(lines, number, places)
            if len(rows):
                outside = (rows[:, _LAYER] < 0) | (rows[:, _LAYER] >= self._head.n_layer)
                outside |= (rows[:, _EXPERT] < 0) | (rows[:, _EXPERT] >= self._head.n_expert)
                if outside.any():
                    self._refuse_outside(lines, number, rows, int(np.argmax(outside)))
                yield rows
            number += len(lines)

    def _parsed(self, lines: Sequence[str], number: int, places: Sequence[int]) -> NDArray[np.int32]:
        if not any(map(_is_row, lines)):
            return np.empty((0, len(places)), np.int32)
        width = len(self._names)
        if set(map(_commas, lines)) == {width - 1}:  # loadtxt takes rows that are longer than the others
            with contextlib.suppress(ValueError, OverflowError, Warning), warnings.catch_warnings():
                warnings.simplefilter("error")  # it warns of a 1.5 that it makes a 1
                return np.loadtxt(lines, np.int32, comments=None, delimiter=",", usecols=places, ndmin=2)
        return self._one_by_one(lines, number, places)

    def _one_by_one(self, lines: Sequence[str], number: int, places: Sequence[int]) -> NDArray[np.int32]:
        """Rows among blank lines and comments, or the line that is no row."""
        width = len(self._names)
        rows = []
        for at, line in enumerate(lines):
            if not _is_row(line):
                continue
            cells = line.rstrip("\r\n").split(",")
            try:
                row = [int(cells[place]) for place in places]
                np.array(row, np.int32)
            except (IndexError, ValueError, OverflowError):
                row = []
            if not row or len(cells) < width:
                self._fail(number + at, f"is no row: {line.rstrip()[:60]!r}", f"it needs {width} numbers")
            rows.append(row)
        return np.array(rows, np.int32)

    def _refuse_outside(self, lines: Sequence[str], number: int, rows: NDArray[np.int32], at: int) -> NoReturn:
        written = [index for index, line in enumerate(lines) if _is_row(line)]
        where = f"names expert {rows[at, _EXPERT]} of layer {rows[at, _LAYER]}"
        wanted = f"the model has {self._head.n_layer} layers with {self._head.n_expert} experts"
        self._fail(number + written[at], where, wanted)

    def _fail(self, number: int, what: str, wanted: str) -> NoReturn:
        raise TraceError(f"{self._path}: line {number} {what}; {wanted}")


def _is_row(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#")


def _commas(line: str) -> int:
    return line.count(",")


def _checked(trace: Lookups, head: RouteTrace | Head, model: ModelFacts | None) -> Lookups:
    """``trace`` with the sizes that it is to be replayed with. Raises :class:`TraceError` if it cannot be."""
    if not trace.counted.any():
        raise TraceError(f"{trace.source}: has no decode row (phase {DECODE}), which hits are counted of; record one")
    if trace.drafts is not None and trace.drafts.verified.any() and not trace.drafts.batches:
        raise TraceError(f"{trace.source}: has verify batches without an accepted token; record it again")
    trace = replace(trace, entry_bytes=_sizes(trace, head, model))
    touch = np.repeat(np.arange(len(trace.counted)), np.diff(trace.starts))
    seen = np.sort(touch * _MOST + (trace.keys & 0xFFFF))
    again = np.flatnonzero(seen[1:] == seen[:-1])
    if len(again):
        where, expert = divmod(int(seen[again[0]]), _MOST)
        layer = int(trace.keys[trace.starts[where]]) >> 24
        raise TraceError(
            f"{trace.source}: names expert {expert} of layer {layer} twice for one token; correct the slots"
        )
    return trace


def _sizes(trace: Lookups, head: RouteTrace | Head, model: ModelFacts | None) -> Mapping[int, int]:
    sizes = dict(trace.entry_bytes)
    if model is not None:
        banks = [*model.banks, *(bank for bank in model.nextn_banks if bank.layer < head.n_layer)]
        sizes = dict.fromkeys((bank.layer for bank in banks), 0)
        for bank in banks:
            sizes[bank.layer] += bank.entry_bytes
    for layer in np.unique(trace.keys >> 24).tolist():
        if not sizes.get(layer):
            where = f"{model.path} has no experts in" if model else "its header says no expert_bytes of"
            raise TraceError(f"{trace.source}: {where} layer {layer}; give --model FILE, the model that was run")
        if sizes[layer] > _MOST_BYTES:
            raise TraceError(f"{trace.source}: says expert_bytes={sizes[layer]} of layer {layer}; correct the header")
    if model is not None and head.n_expert > min(bank.n_expert for bank in model.banks):
        each = min(bank.n_expert for bank in model.banks)
        raise TraceError(
            f"{trace.source}: is of a model with {head.n_expert} experts a layer, {model.path} has {each}; "
            "give --model FILE, the model that was run"
        )
    return sizes
