"""Metrics for Prometheus: a textfile for the node exporter, and a registry that a server may show.

Counters go on over the runs of one process, as Prometheus expects; a token without a figure adds nothing.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from bmoe import hookimpl
from bmoe.contracts import Facts, Options, Provider, RunRecord, RunSummary, Sink, TokenRecord
from bmoe_plugins.sinks._file import ELSEWHERE, refused, whole

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

COUNTERS = {
    "decode_s": ("decode_seconds", "Time inside llama_decode"),
    "read_wait_s": ("read_wait_seconds", "Of it, waiting for expert reads"),
    "manage_s": ("manage_seconds", "Of it, evicting and staging"),
    "lookups": ("lookups", "Routed expert entries"),
    "hits": ("hits", "Of them, entries that were in memory"),
    "evictions": ("evictions", "Entries that left the cache"),
    "rereads": ("rereads", "Entries read again that had been evicted"),
    "majflt": ("major_faults", "Major page faults of the process"),
    "drafted": ("drafted_tokens", "Tokens that a drafter proposed"),
    "accepted": ("accepted_tokens", "Of them, tokens that were accepted"),
    "draft_s": ("draft_seconds", "Time that drafting took"),
}
READS = {
    "demand_bytes": "demand",
    "speculative_bytes": "speculative",
    "wasted_bytes": "wasted",
    "draft_bytes": "draft",
    "rejected_bytes": "rejected",
}
SIZES = {"rss_anon_bytes": "anon", "rss_file_bytes": "file", "rss_shmem_bytes": "shmem", "swap_bytes": "swap"}
BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class PrometheusOptions(Options):
    """Options of the ``prometheus`` sink."""

    path: str = Field(default="", description="textfile that is replaced with the metrics; empty = none is written")
    interval_s: float = Field(default=15, ge=0, le=3600, description="least seconds between two writings")

    @field_validator("path")
    @classmethod
    def _named(cls, path: str) -> str:
        if path and not path.endswith(".prom"):
            raise ValueError("must end in .prom, or the node exporter does not read it")
        return whole(path)


class Prometheus:
    """``registry`` has the metrics, all named ``bmoe_…``; a server shows it, the textfile is written from it."""

    def __init__(self, options: PrometheusOptions) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

        self.registry: CollectorRegistry = CollectorRegistry()
        self._path, self._interval = options.path, options.interval_s
        self._written = 0.0
        to = self.registry
        self._counters = {field: Counter(f"bmoe_{n}", said, registry=to) for field, (n, said) in COUNTERS.items()}
        self._tokens = Counter("bmoe_tokens", "Tokens generated", registry=to)
        self._runs = Counter("bmoe_runs", "Runs that ended, by why", ["stop"], registry=to)
        self._causes = Counter("bmoe_slow_runs", "Runs that something made slow, by what", ["cause"], registry=to)
        said = "Expert bytes; wasted is a part of speculative, rejected of demand"
        self._read = Counter("bmoe_read_bytes", said, ["kind"], registry=to)
        self._size = Gauge("bmoe_memory_bytes", "Memory of the process now", ["kind"], registry=to)
        self._window = Gauge("bmoe_window_hit_rate", "Hit rate of the last 32 decodes", registry=to)
        self._seconds = Histogram("bmoe_token_seconds", "Decode, draft and between two", buckets=BUCKETS, registry=to)
        self._run = Info("bmoe_run", "The run that is going on, or was the last", registry=to)
        if self._path:
            self._write()  # what cannot be written is refused before the model is read

    def open(self, run: RunRecord, /) -> None:
        """Say which run this is."""
        known = {"model": Path(run.model).name, "arch": run.arch, "version": run.versions.get("bmoe", "")}
        marks = {name: str(getattr(run, name)).lower() for name in ("traced", "sampled", "lossy", "speculative")}
        self._run.info({**known, **marks})

    def token(self, record: TokenRecord, /) -> None:
        """Count a token; write the file if it is old. Raises PluginError naming the option."""
        self._tokens.inc()
        for field, counter in self._counters.items():
            counter.inc(getattr(record, field) or 0)
        for field, kind in READS.items():
            self._read.labels(kind).inc(getattr(record, field) or 0)
        for field, kind in SIZES.items():
            if (size := getattr(record, field)) is not None:
                self._size.labels(kind).set(size)
        if record.window_hit_rate is not None:
            self._window.set(record.window_hit_rate)
        if record.index and record.decode_s is not None:  # the first token's decode is the prompt's
            self._seconds.observe(record.decode_s + (record.draft_s or 0.0) + (record.between_s or 0.0))
        if self._path and time.monotonic() - self._written >= self._interval:
            self._write()

    def close(self, summary: RunSummary | None, /) -> None:
        """Count the run and write the file. Raises PluginError naming the option."""
        if summary is not None:
            self._runs.labels(summary.stop).inc()
            for cause in summary.causes or ():
                self._causes.labels(cause.name).inc()
        if self._path:
            self._write()

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(self._path, self.registry)  # to a file beside it, which then takes its place
        except OSError as error:
            raise refused(self._path, error, ELSEWHERE) from error
        self._written = time.monotonic()


def missing() -> str:
    """Why the sink cannot be used here; empty if it can."""
    if importlib.util.find_spec("prometheus_client") is None:
        return "prometheus-client is not installed; pip install 'bmoe[prometheus]'"
    return ""


def _build(options: PrometheusOptions, facts: Facts) -> Prometheus:
    return Prometheus(options)


@hookimpl
def bmoe_sinks() -> Sequence[Provider[Sink]]:
    """The ``prometheus`` sink."""
    summary = "metrics for Prometheus, in a textfile"
    return [Provider("prometheus", _build, PrometheusOptions, available=missing, summary=summary)]
