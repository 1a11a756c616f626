"""All traces that a profile asks for, from the opening of their files to the end of the engine."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Protocol

from bmoe.contracts import Fetcher
from bmoe.errors import ProfileError
from bmoe.native.nodetimer import NodeTimer
from bmoe.plan import Plan
from bmoe.problems import toml_value
from bmoe.replay.route_trace import TraceError
from bmoe.stream import Stream
from bmoe.trace import compute, io
from bmoe.trace.output import TraceLines, TracePlace
from bmoe.trace.route import RouteTracer
from bmoe.trace.rows import PARQUET, RouteLines, RouteParquet

KINDS = ("route", "io", "compute")


class Written(Protocol):
    """One trace: rows that are in the file, and why it ended early, or ""."""

    @property
    def rows(self) -> int:
        """Rows in the file."""

    @property
    def failure(self) -> str:
        """Why it ended early."""

    def close(self) -> None:
        """Put the file in its place."""


class Tracing:
    """Opens the files before anything else is opened, so that a place that cannot be written to costs nothing.

    Raises ProfileError naming the key. ``written`` are the traces by their kind.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._began = time.perf_counter()
        self._closed = False
        self._fetcher: io.TracedFetcher | None = None
        self.paths = {kind: path for kind in KINDS if (path := getattr(plan.profile.trace, kind)) is not None}
        self.written: dict[str, Written] = {}
        if not self.paths:
            return
        self._apart()
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)
            for kind, path in self.paths.items():
                self.written[kind] = self._open(kind, path)
            opened.pop_all()

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        """The fetcher to use: itself, unless reads are traced."""
        if "io" not in self.written:
            return fetcher
        out = self.written["io"]
        assert isinstance(out, TraceLines)
        for line in io.header(self._plan.facts, direct=fetcher.direct):
            out.append(line)
        self._fetcher = io.TracedFetcher(fetcher, self._plan.facts, out, self._began)
        return self._fetcher

    def attach(self, stream: Stream) -> None:
        """Watch a stream."""
        route, timed = self.written.get("route"), self.written.get("compute")
        if isinstance(route, (RouteLines, RouteParquet)):
            stream.watch(RouteTracer(stream, route))
        if self._fetcher is not None:
            stream.watch(io.IoTracer(self._fetcher))
        if isinstance(timed, TraceLines):
            if isinstance(stream.seam, NodeTimer):
                stream.watch(compute.NodeTracer(stream.seam, timed, self._began))
            else:
                stream.watch(compute.LayerTracer(stream, timed, self._began))

    def close(self) -> None:
        """End every trace; one that has no row leaves no file. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._fetcher is not None:
            self._fetcher.flush()
        for trace in self.written.values():
            trace.close()

    def failures(self) -> list[str]:
        """Why traces ended early, one line each."""
        return [trace.failure for trace in self.written.values() if trace.failure]

    def _open(self, kind: str, path: str) -> Written:
        try:
            return self._opened(kind, TracePlace(path))
        except TraceError as error:
            raise ProfileError(f"{self._said(kind)}: {error}") from error

    def _opened(self, kind: str, place: TracePlace) -> Written:
        try:
            if kind == "route":
                form, plan = RouteParquet if place.path.endswith(PARQUET) else RouteLines, self._plan
                return form(place, plan.facts, drafts=plan.draft is not None, head=plan.drafts_with_head)
            header = compute.header(self._plan.facts, self._plan.profile.trace.detail) if kind == "compute" else ()
            return TraceLines(place, header)
        except BaseException:
            place.drop()
            raise

    def _apart(self) -> None:
        """Each file is one trace's, and none is a file of the model."""
        taken: dict[str, str] = {os.path.realpath(shard.path): "" for shard in self._plan.facts.shards}
        for kind, path in self.paths.items():
            real = os.path.realpath(path)
            if real in taken and not real.startswith("/dev/"):
                other = f"trace.{taken[real]}" if taken[real] else "the model"
                raise ProfileError(f"{self._said(kind)}: is the file of {other} too; choose another place")
            taken[real] = kind

    def _said(self, kind: str) -> str:
        return f"{self._plan.profile.where(f'trace.{kind}')} = {toml_value(self.paths[kind])}"
