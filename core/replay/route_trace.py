"""Reads and writes ``route_trace v1``: which experts every token was routed to, as a text file with one row for each.

The format is that of BigMoeOnEdge's published traces (docs/reference/route-trace.md has it in full), so that theirs can
be read and ours be shown by its tools.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from bmoe.contracts import ModelFacts, Phase
from bmoe.errors import BmoeError
from bmoe.replay.offline import Step, Trace

PREFILL, DECODE, ACCEPTED, REJECTED, GUESS = 0, 1, 2, 3, 4
MISS, HIT, SPECULATED = 0, 1, 2
VERIFY = ACCEPTED
"""The phase of a verify batch as a whole, before it is known which of its tokens are accepted."""
CODES: Mapping[Phase, int] = {"prefill": PREFILL, "decode": DECODE, "verify": VERIFY, "draft": GUESS}
VERSION = "route_trace v1"

_HEADER_KEYS = ("n_layer", "n_expert", "n_expert_used")
_BLOCK = re.compile(r"blk\.(\d+)\.")


class TraceError(BmoeError):
    """A routing trace cannot be used; names file, line, what was found and what is wanted."""

    exit_code = 2


class Routed(NamedTuple):
    """One expert of one routing: a row of the file.

    ``step`` is the position of the token in its context, -1 if a routing is not one token's. ``slot`` is the router's
    rank from 0. ``weight`` is the share that was applied, NaN if it was not seen. ``residency`` is :data:`MISS`,
    :data:`HIT` or :data:`SPECULATED` (first use of what was read ahead); ``expert_bytes`` what was read for this row.
    ``round`` numbers rounds of draft and verification, -1 outside of them; ``place`` is the token's in its batch.
    """

    turn: int
    phase: int
    step: int
    layer: int
    slot: int
    expert: int
    weight: float
    residency: int
    expert_bytes: int
    round: int = -1
    place: int = 0


DRAFT_COLUMNS = Routed._fields[-2:]
COLUMNS = Routed._fields[: -len(DRAFT_COLUMNS)]
"""What every trace has; those of drafts are after them, where the run had a drafter."""


class LayerBytes(NamedTuple):
    """Bytes of one expert of a layer, 0 for a layer without, and of the layer's other weights."""

    expert_bytes: int
    dense_bytes: int


@dataclass(frozen=True, slots=True)
class RouteTrace:
    """A trace: the model that was run, its layers by number, and rows in the order of the routings.

    ``drafts`` tells that it has :data:`DRAFT_COLUMNS`.
    """

    model: str
    arch: str
    n_layer: int
    n_expert: int
    n_used: int
    layers: Mapping[int, LayerBytes]
    rows: Sequence[Routed]
    drafts: bool = False

    def routings(self, phase: int | None = None) -> Iterator[list[Routed]]:
        """The rows of one token in one layer at a time, of one phase if it is named."""
        group: list[Routed] = []
        for row in self.rows:
            if phase is not None and row.phase != phase:
                continue
            if group and (row[:4] != group[0][:4] or row.slot <= group[-1].slot):
                yield group
                group = []
            group.append(row)
        if group:
            yield group

    def steps(self, phase: int = DECODE) -> Trace:
        """What :func:`bmoe.replay.replay` takes: per token its layers, in the order of the file, with their experts.

        Of tokens that were decoded one by one: in a verify batch the layers of one token do not follow each other.
        """
        trace: list[list[tuple[int, Sequence[int]]]] = []
        before: tuple[int, int] | None = None
        for group in self.routings(phase):
            token = group[0].turn, group[0].step
            if token != before:
                trace.append([])
                before = token
            trace[-1].append((group[0].layer, tuple(row.expert for row in group)))
        steps: list[Step] = list(trace)
        return steps


def trace_of(facts: ModelFacts, rows: Sequence[Routed], *, head: bool = False) -> RouteTrace:
    """A trace of a model that was run here, without the columns of drafts.

    Its layers are those of the trunk, and of the head for next-token prediction where it guesses (``head``).
    """
    n_layer = facts.n_layer - (0 if head else facts.n_nextn)
    experts, dense = dict.fromkeys(range(n_layer), 0), dict.fromkeys(range(n_layer), 0)
    for bank in (*facts.banks, *facts.nextn_banks):
        if bank.layer < n_layer:
            experts[bank.layer] += bank.entry_bytes
    for tensor in facts.dense:
        match = _BLOCK.match(tensor.name)
        if match and int(match[1]) < n_layer:
            dense[int(match[1])] += tensor.nbytes
    layers = {layer: LayerBytes(experts[layer], dense[layer]) for layer in range(n_layer)}
    return RouteTrace(os.path.basename(facts.path), facts.arch, n_layer, facts.n_expert, facts.n_used, layers, rows)


def write_trace(path: str | os.PathLike[str], trace: RouteTrace) -> None:
    """Write a trace; raises :class:`TraceError` if the place cannot be written to."""
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.writelines(trace_lines(trace))
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror}); choose another place") from error


def read_trace(path: str | os.PathLike[str]) -> RouteTrace:
    """Read a trace; columns beyond those of :class:`Routed` are passed over. Raises :class:`TraceError`."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise TraceError(f"{path}: cannot be read ({reason}); name a file of {VERSION}") from error
    return parse_trace(path, lines)


def parse_trace(path: str | os.PathLike[str], lines: Sequence[str]) -> RouteTrace:
    """The trace in ``lines``; ``path`` is what messages call it. Raises :class:`TraceError`."""
    return _Reader(os.fspath(path), lines).trace()


def trace_lines(trace: RouteTrace) -> Iterator[str]:
    """The file, line by line; of a trace without rows, what comes before them."""
    name = trace.model.replace(" ", "_")  # values end at a blank
    yield f"# {VERSION}\n"
    yield f"# model={name} arch={trace.arch} n_layer={trace.n_layer} n_expert={trace.n_expert} "
    yield f"n_expert_used={trace.n_used}\n"
    for layer, size in sorted(trace.layers.items()):
        yield f"# layer={layer} expert_bytes={size.expert_bytes} dense_bytes={size.dense_bytes}\n"
    names = columns(trace.drafts)
    yield ",".join(names) + "\n"
    for row in trace.rows:
        cells = row[: len(names)]
        yield ",".join(f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in cells) + "\n"


def columns(drafts: bool) -> tuple[str, ...]:
    """The names of the columns of a trace with or without those of drafts."""
    return (*COLUMNS, *DRAFT_COLUMNS) if drafts else COLUMNS


class _Reader:
    """One file: its comment lines first, then the names of the columns, then rows."""

    def __init__(self, path: str, lines: Sequence[str]) -> None:
        self._path, self._lines = path, lines

    def trace(self) -> RouteTrace:
        if not self._lines or self._lines[0].strip() != f"# {VERSION}":
            found = self._lines[0][:40] if self._lines else ""
            self._fail(1, f"begins with {found!r}", f"a trace begins with '# {VERSION}'")
        start = next((i for i, line in enumerate(self._lines) if not line.startswith("#")), len(self._lines))
        values: dict[str, str] = {}
        layers: dict[int, LayerBytes] = {}
        for number, line in enumerate(self._lines[1:start], start=2):
            found_here = dict(part.split("=", 1) for part in line[1:].split() if "=" in part)
            if "layer" in found_here:
                sizes = (self._count(number, found_here, key) for key in LayerBytes._fields)
                layers[self._count(number, found_here, "layer")] = LayerBytes(*sizes)
            else:
                values |= found_here
        n_layer, n_expert, n_used = (self._count(2, values, key) for key in _HEADER_KEYS)
        names = self._lines[start].split(",") if start < len(self._lines) else []
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            self._fail(start + 1, f"has no column {missing[0]!r}", f"the columns are {','.join(COLUMNS)}")
        drafts = all(name in names for name in DRAFT_COLUMNS)
        rows = list(self._rows(start, names, columns(drafts), n_layer, n_expert))
        model, arch = values.get("model", ""), values.get("arch", "")
        return RouteTrace(model, arch, n_layer, n_expert, n_used, layers, rows, drafts)

    def _rows(
        self, start: int, names: Sequence[str], wanted: Sequence[str], n_layer: int, n_expert: int
    ) -> Iterator[Routed]:
        places = [names.index(name) for name in wanted]
        for number, line in enumerate(self._lines[start + 1 :], start=start + 2):
            if not line or line.startswith("#"):
                continue
            cells = line.split(",")
            try:
                row = _row(cells[place] for place in places)
            except (IndexError, ValueError):
                self._fail(number, f"is no row: {line[:60]!r}", f"it needs {len(names)} numbers")
            if not (0 <= row.layer < n_layer and 0 <= row.expert < n_expert):
                where = f"names expert {row.expert} of layer {row.layer}"
                self._fail(number, where, f"the model has {n_layer} layers with {n_expert} experts")
            yield row

    def _count(self, number: int, values: Mapping[str, str], key: str) -> int:
        text = values.get(key, "")
        if not text.isdecimal():
            self._fail(number, f"says {key}={text}" if text else f"says no {key}=", "it must be a whole number")
        return int(text)

    def _fail(self, number: int, what: str, wanted: str) -> NoReturn:
        raise TraceError(f"{self._path}: line {number} {what}; {wanted}")


def _row(cells: Iterable[str]) -> Routed:
    turn, phase, step, layer, slot, expert, weight, residency, expert_bytes, *draft = cells
    return Routed(
        int(turn), int(phase), int(step), int(layer), int(slot), int(expert),
        float(weight), int(residency), int(expert_bytes), *map(int, draft),
    )  # fmt: skip
