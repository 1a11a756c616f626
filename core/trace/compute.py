"""The compute trace of a run: how long each layer took beside its reads, or each node of the graph.

Layers are timed from routing to routing, which the engine sees anyway; nothing is isolated for it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

from bmoe.contracts import BatchContext, ExpertKey, ModelFacts
from bmoe.native.nodetimer import NodeTimer
from bmoe.replay.route_trace import CODES
from bmoe.stream import Stream
from bmoe.trace.io import name_of
from bmoe.trace.output import TraceLines

VERSION = "compute_trace v1"
COLUMNS = (
    "decode", "phase", "step", "tokens", "layer", "node", "op", "start_s", "compute_s", "wait_s", "manage_s",
)  # fmt: skip
BEFORE = -1
"""The layer of what comes before the first routing of a decode, and of nodes without one."""
_LAYER = re.compile(r"-(\d+)(?: |$)")
_NAMELESS = ("node_", "cache_", " ")
"""Nodes that carry no layer and belong to that of the node before."""


class LayerTracer:
    """A row per routing: computing up to the next one, and what was waited and managed within it."""

    def __init__(self, stream: Stream, out: TraceLines, began: float) -> None:
        self._stream, self._out, self._began = stream, out, began
        self._decode = -1
        self._head, self._layer = "", BEFORE
        self._start = self._handled = 0.0
        self._wait = self._manage = 0.0
        self._spent = (0.0, 0.0)
        self._rows = 0

    def begin(self, batch: BatchContext) -> None:
        """A decode begins: what comes before its first routing."""
        self._decode += 1
        self._head = head_of(self._decode, batch)
        self._open(BEFORE, time.perf_counter())
        self._handled, self._spent = self._start, self._counted()

    def routing(self, bank: int, keys: Sequence[ExpertKey]) -> None:
        """A layer was routed: the one before it is over."""
        now = time.perf_counter()
        self._close(now)
        self._open(self._stream.seam.banks[bank].layer, now)
        self._spent = self._counted()

    def handled(self, bank: int) -> None:
        """The reads of a routing were begun or have arrived; computing goes on."""
        self._account()
        self._handled = time.perf_counter()

    def end(self, complete: bool) -> None:
        """The decode ended: so did its last layer."""
        if complete:
            self._close(time.perf_counter())
            self._out.flush(self._rows)
        else:
            self._out.discard()
        self._rows = 0

    def accepted(self, kept: Sequence[int]) -> None:
        """It makes no difference which tokens are kept."""

    def _counted(self) -> tuple[float, float]:
        return self._stream.counters.wait_s, self._stream.counters.manage_s

    def _account(self) -> float:
        """Add what was spent in callbacks since the last time; how much that was."""
        wait, manage = self._counted()
        more_wait, more_manage = wait - self._spent[0], manage - self._spent[1]
        self._wait += more_wait
        self._manage += more_manage
        self._spent = wait, manage
        return more_wait + more_manage

    def _open(self, layer: int, now: float) -> None:
        self._layer, self._start = layer, now
        self._wait = self._manage = 0.0

    def _close(self, now: float) -> None:
        compute = max(0.0, now - self._handled - self._account())
        start = self._start - self._began
        self._out.append(
            f"{self._head},{self._layer},,,{start:.6f},{compute:.7f},{self._wait:.7f},{self._manage:.7f}\n"
        )
        self._rows += 1


class NodeTracer:
    """A row per node that computes something; each is isolated for it, which takes time of its own."""

    def __init__(self, timer: NodeTimer, out: TraceLines, began: float) -> None:
        self._timer, self._out, self._began = timer, out, began
        self._decode, self._head = -1, ""

    def begin(self, batch: BatchContext) -> None:
        """A decode begins."""
        self._decode += 1
        self._head = head_of(self._decode, batch)
        self._timer.timed()

    def routing(self, bank: int, keys: Sequence[ExpertKey]) -> None:
        """Timed with its node."""

    def handled(self, bank: int) -> None:
        """Not part of any node."""

    def accepted(self, kept: Sequence[int]) -> None:
        """It makes no difference which tokens are kept."""

    def end(self, complete: bool) -> None:
        """The decode ended."""
        rows = self._timer.timed()
        if not complete:
            return
        layer = BEFORE
        for name, op, start, took in rows:
            found = _LAYER.search(name)
            if found:
                layer = int(found[1])
            elif not name.startswith(_NAMELESS):
                layer = BEFORE
            word = re.sub(r"[,\s]", "_", name)
            self._out.append(f"{self._head},{layer},{word},{op},{start - self._began:.6f},{took:.7f},,\n")
        self._out.flush(len(rows))


def head_of(decode: int, batch: BatchContext) -> str:
    """The first cells of each row of a decode; its step is the position of its last token."""
    positions = batch.positions
    return f"{decode},{CODES[batch.phase]},{positions[-1] if positions else -1},{len(positions)}"


def header(facts: ModelFacts, detail: str) -> Iterator[str]:
    """The lines before the rows."""
    yield f"# {VERSION}\n"
    yield f"# model={name_of(facts)} arch={facts.arch} n_layer={facts.n_layer - facts.n_nextn} detail={detail}\n"
    yield ",".join(COLUMNS) + "\n"
