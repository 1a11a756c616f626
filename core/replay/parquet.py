"""Reads a routing trace in Parquet into columns, with what the router gave to every expert where it was recorded."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.replay.lookups import Lookups, in_columns
from bmoe.replay.rounds import drafted
from bmoe.replay.route_trace import DECODE, DRAFT_COLUMNS, LayerBytes, TraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"PAR1"
COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert")
_PROBS = "probs"
_COUNTS = ("n_layer", "n_expert", "n_used")
_MOST = 1 << 16  # of layers and of experts, each of which has 16 bits of an ExpertKey


@dataclass(frozen=True, slots=True)
class Head:
    """What the metadata of a trace says: its model, and the sizes of its layers by number."""

    model: str
    arch: str
    n_layer: int
    n_expert: int
    n_used: int
    layers: Mapping[int, LayerBytes]


def pyarrow() -> tuple[Any, Any]:
    """The two modules of it that are used. Raises :class:`TraceError` without the package."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise TraceError(
            "needs pyarrow for Parquet; install it (pip install 'bmoe[parquet]') or name a file that ends in .csv"
        ) from error


def read_table(path: str, names: list[str]) -> tuple[Head, Any]:
    """The head of a trace and an arrow table of those of the columns ``names`` that it has.

    Raises :class:`TraceError` if it is none, or was not closed.
    """
    arrow, parquet = pyarrow()
    try:
        with parquet.ParquetFile(path) as file:
            table = file.read(columns=[name for name in names if name in file.schema_arrow.names])
        meta = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
        sizes = [tuple(int(n) for n in part.split(":")) for part in meta["layers"].split()]
        layers = {layer: LayerBytes(expert, dense) for layer, expert, dense in sizes}
        n_layer, n_expert, n_used = (int(meta[key]) for key in _COUNTS)
        if not (0 < n_layer <= _MOST and 0 < n_expert <= _MOST):
            raise ValueError("counts that no model has")
        return Head(meta.get("model", ""), meta.get("arch", ""), n_layer, n_expert, n_used, layers), table
    except (OSError, KeyError, ValueError, TypeError, arrow.ArrowException) as error:
        raise TraceError(f"{path}: is no routing trace in Parquet that was closed; record it again") from error


def parquet_lookups(path: str) -> tuple[Head, Lookups]:
    """The trace in ``path``, with ``entry_bytes`` and ``probs`` as the file has them. Raises :class:`TraceError`."""
    head, table = read_table(path, [*COLUMNS, *DRAFT_COLUMNS, _PROBS])
    names = lookup_columns(table.schema.names)
    missing = [name for name in COLUMNS if name not in table.schema.names]
    if missing:
        raise TraceError(f"{path}: has no column {missing[0]!r}; record it again")
    try:
        rows = np.stack([table.column(name).to_numpy() for name in names], axis=1)
        if not np.issubdtype(rows.dtype, np.integer) or (len(rows) and np.abs(rows).max() >= 1 << 31):
            raise ValueError("no whole numbers")
    except ValueError as error:
        raise TraceError(f"{path}: has a row that is none; record it again") from error
    for name, most in (("layer", head.n_layer), ("expert", head.n_expert)):
        column = rows[:, COLUMNS.index(name)]
        outside = (column < 0) | (column >= most)
        if outside.any():
            at = int(np.argmax(outside))
            raise TraceError(
                f"{path}: row {at} names {name} {column[at]}; the model has {head.n_layer} layers with {head.n_expert} "
                "experts"
            )
    rows = rows.astype(np.int32)
    refuse_unplaced(path, rows)
    trace = in_columns(
        rows,
        decode=DECODE,
        source=path,
        model=head.model,
        arch=head.arch,
        n_layer=head.n_layer,
        n_expert=head.n_expert,
        n_used=head.n_used,
        entry_bytes={layer: size.expert_bytes for layer, size in head.layers.items()},
    )
    drafts = trace.drafts
    if drafts is None:
        return head, replace(trace, probs=_probs(path, table, trace.starts[:-1], head.n_expert))
    heard = replace(drafts, probs=_probs(path, table, drafts.heard_rows, head.n_expert))
    return head, replace(trace, probs=_probs(path, table, drafts.first_rows, head.n_expert), drafts=heard)


def lookup_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Those of the columns ``names`` that look-ups are made of; a trace with a drafter has two more."""
    return (*COLUMNS, *DRAFT_COLUMNS) if all(name in names for name in DRAFT_COLUMNS) else COLUMNS


def refuse_unplaced(path: str, rows: NDArray[np.int32]) -> None:
    """Raise :class:`TraceError` for rows of drafts that do not say of which round and batch place they are."""
    if rows.shape[1] == len(COLUMNS) and drafted(rows):
        raise TraceError(f"{path}: has rows of drafts and no column {DRAFT_COLUMNS[0]!r}; record it again")


def _probs(path: str, table: Any, firsts: NDArray[np.int64], n_expert: int) -> NDArray[np.float32] | None:
    """Float32 [len(firsts), n_expert]: those on the rows ``firsts``, NaN where there are none or they are no shares.

    None if no such row has any.
    """
    if _PROBS not in table.schema.names:
        return None
    found = np.full((len(firsts), n_expert), np.nan, np.float32)
    # chunk by chunk, since a list of lists in one piece has 32 bit offsets
    begin = 0
    for chunk in table.column(_PROBS).chunks:
        lists = chunk.is_valid().to_numpy(zero_copy_only=False)
        lengths = chunk.value_lengths().to_numpy(zero_copy_only=False)[lists]
        if (lengths != n_expert).any():
            wrong = int(lengths[lengths != n_expert][0])
            raise TraceError(f"{path}: has probabilities of {wrong} experts, of {n_expert}; record it again")
        values = np.asarray(chunk.flatten().to_numpy(zero_copy_only=False), np.float32).reshape(-1, n_expert)
        places = np.full(len(lists), -1)
        places[lists] = np.arange(len(values))
        mine = (firsts >= begin) & (firsts < begin + len(lists))
        rows = places[firsts[mine] - begin]
        into = np.flatnonzero(mine)[rows >= 0]
        found[into] = values[rows[rows >= 0]]
        begin += len(lists)
    found[~np.isfinite(found).all(axis=1)] = np.nan
    return None if np.isnan(found[:, 0]).all() else found
