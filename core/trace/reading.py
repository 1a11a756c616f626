"""Reads traces and run records for a page: as columns, and up to the last whole line of a run that was cut off."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from bmoe.replay.route_trace import RouteTrace, TraceError, columns, parse_trace, read_trace
from bmoe.trace import compute
from bmoe.trace import io as reads

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUTE = "route_trace v1"
_BEGINS = {_ROUTE: "route", reads.VERSION: "io", compute.VERSION: "compute"}
_WANTED = f"name a {_ROUTE}, a {reads.VERSION}, a {compute.VERSION} or lines of the jsonl sink"
_CHUNK = 1 << 19
_TEXT = frozenset({"node", "op"})
_LATER = frozenset({"phase"})
"""Columns of reads that an older trace lacks."""


@dataclass(slots=True)
class Loaded:
    """One file: its kind (route, io, compute, run), what its header says, columns by name, and what was amiss."""

    path: str
    kind: str
    header: dict[str, str] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    model: RouteTrace | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def load(path: str) -> Loaded:
    """Read a file, whichever it is. Raises :class:`TraceError` in one line if it is none or damaged."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            if head.startswith(b"PAR1"):
                return _parquet(path)
            kind = next((kind for mark, kind in _BEGINS.items() if head.startswith(f"# {mark}\n".encode())), "")
            kind = kind or next(
                (kind for mark, kind in _BEGINS.items() if head.startswith(f"# {mark}\r\n".encode())), ""
            )
            if not kind and not head.lstrip().startswith(b"{"):
                begins = head.split(b"\n")[0][:40].decode("utf-8", "replace")
                said = f"begins with {begins!r}" if head else "is empty"
                raise TraceError(f"{path}: {said}, which no trace does; {_WANTED}")
            loaded = Loaded(path, kind or "run")
            end = _whole(file, loaded)
            file.seek(0)
            if not kind:
                _records(file, end, loaded)
            elif kind == "route":
                _routes(file, end, loaded)
            else:
                _table(file, end, loaded)
            return loaded
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) or "null byte" in str(error):
            raise TraceError(
                f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); {_WANTED}"
            ) from error
        raise


def _whole(file: BinaryIO, loaded: Loaded) -> int:
    """Where the last whole line ends."""
    size = file.seek(0, os.SEEK_END)
    end = size
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            end = start + at + 1
            break
        end = start
    if end < size:
        loaded.notices.append(f"{loaded.path}: the last line is cut off and left out")
    return end


def _lines(file: BinaryIO, end: int) -> Iterator[str]:
    """Lines up to a place, without what is no text."""
    left = end
    for line in file:
        if left <= 0:
            return
        left -= len(line)
        yield line.decode("utf-8", "replace").rstrip("\r\n")


def _begin(lines: Iterator[str]) -> tuple[list[str], list[str]]:
    """The comment lines, and the names of the columns."""
    comments: list[str] = []
    for line in lines:
        if not line.startswith("#"):
            return comments, line.split(",")
        comments.append(line)
    return comments, []


def _routes(file: BinaryIO, end: int, loaded: Loaded) -> None:
    import numpy as np

    lines = _lines(file, end)
    comments, names = _begin(lines)
    model = parse_trace(loaded.path, [*comments, ",".join(names)])
    kept = [name for name in columns(model.drafts) if name != "weight"]
    places = [names.index(name) for name in kept]
    rows = (line for line in lines if line and line[0] != "#")
    parts: list[NDArray[Any]] = []
    while True:
        chunk = list(itertools.islice(rows, _CHUNK))
        if not chunk:
            break
        try:
            part = np.loadtxt(chunk, dtype=np.int64, delimiter=",", usecols=places, ndmin=2, comments=None)
        except ValueError:
            read_trace(loaded.path)  # says which line it is
            raise TraceError(f"{loaded.path}: has a row that is none; record it again") from None
        layers, experts = part[:, kept.index("layer")], part[:, kept.index("expert")]
        if layers.min() < 0 or layers.max() >= model.n_layer or experts.min() < 0 or experts.max() >= model.n_expert:
            read_trace(loaded.path)
        parts.append(part.astype(np.int32) if part.max() < 1 << 31 and part.min() >= -(1 << 31) else part)
    table = np.concatenate(parts) if parts else np.empty((0, len(kept)), np.int32)
    loaded.model, loaded.columns = model, {name: table[:, index] for index, name in enumerate(kept)}


def _parquet(path: str) -> Loaded:
    import numpy as np

    from bmoe.trace.rows import read_parquet

    trace = read_parquet(path)
    kept = [name for name in columns(trace.drafts) if name != "weight"]
    found = {name: np.array([getattr(row, name) for row in trace.rows], np.int64) for name in kept}
    return Loaded(path, "route", columns=found, model=trace)


def _table(file: BinaryIO, end: int, loaded: Loaded) -> None:
    """Columns of numbers, NaN where a cell is empty, and of words."""
    import numpy as np

    lines = _lines(file, end)
    comments, names = _begin(lines)
    for line in comments[1:]:
        loaded.header |= dict(part.split("=", 1) for part in line[1:].split() if "=" in part)
    wanted: Sequence[str] = compute.COLUMNS
    if loaded.kind == "io":
        wanted = [name for name in reads.COLUMNS if name in names or name not in _LATER]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise TraceError(f"{loaded.path}: line {len(comments) + 1} has no column {missing[0]!r}; record it again")
    numbers = [name for name in wanted if name not in _TEXT]
    places = [names.index(name) for name in numbers]
    words = {name: names.index(name) for name in wanted if name in _TEXT}
    texts: dict[str, list[str]] = {name: [] for name in words}
    parts: list[NDArray[Any]] = []
    first = len(comments) + 2
    while True:
        chunk = list(itertools.islice((line for line in lines if line), _CHUNK))
        if not chunk:
            break
        parts.append(_numbers(loaded.path, chunk, places, len(names), first))
        first += len(chunk)
        for name, place in words.items():
            texts[name] += [line.split(",", place + 1)[place] for line in chunk]
    table = np.concatenate(parts) if parts else np.empty((0, len(places)))
    loaded.columns = {**{name: table[:, index] for index, name in enumerate(numbers)}, **texts}


def _numbers(path: str, chunk: Sequence[str], places: Sequence[int], width: int, first: int) -> NDArray[Any]:
    import numpy as np

    def number(text: str) -> float:
        return float(text) if text else float("nan")

    for index, line in enumerate(chunk):
        if line.count(",") != width - 1:
            raise TraceError(f"{path}: line {first + index} is no row: {line[:60]!r}; it needs {width} cells")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converters: Any = dict.fromkeys(places, number)
        try:
            return np.loadtxt(
                chunk, np.float64, delimiter=",", usecols=places, ndmin=2, comments=None, converters=converters
            )
        except ValueError:
            for index, line in enumerate(chunk):
                cells = line.split(",")
                try:
                    [number(cells[place]) for place in places]
                except ValueError:
                    raise TraceError(
                        f"{path}: line {first + index} is no row: {line[:60]!r}; record it again"
                    ) from None
            raise


def _records(file: BinaryIO, end: int, loaded: Loaded) -> None:
    """Lines of JSON; at least one has to be a record of bmoe."""
    for number, line in enumerate(_lines(file, end), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise TraceError(f"{loaded.path}: line {number} is no JSON: {line[:40]!r}; {_WANTED}") from None
        if isinstance(record, dict) and record.get("event") in ("run", "token", "summary"):
            loaded.records.append(record)
    if not loaded.records:
        raise TraceError(f"{loaded.path}: has no record of a run; {_WANTED}")
