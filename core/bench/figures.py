"""What one side's trials come to: medians and spread over trials, rates over all of their tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bmoe.bench.trial import Trial, total


@dataclass(frozen=True, slots=True)
class Spread:
    """Lower quartile, median and upper quartile."""

    low: float
    median: float
    high: float

    def inverse(self) -> Spread:
        """The same of one over each value."""
        return Spread(1 / self.high, 1 / self.median, 1 / self.low)


@dataclass(frozen=True, slots=True)
class Figures:
    """A side's figures over ``trials``; None = unmeasured, as everything that is read is without streaming.

    ``token_s`` and ``tok_s`` are of the trials' means, ``slowest_s`` is the 95th percentile of single tokens.
    ``read_wait_s`` is per token, ``read_wait_share`` of the decode time. ``filling`` tells that the cache was still
    filling when measuring began: nothing was evicted although experts were missing.
    """

    trials: int
    token_s: Spread
    tok_s: Spread
    slowest_s: float
    prefill_s: Spread
    open_s: Spread
    hit_rate: float | None
    bytes_per_token: float | None
    read_wait_s: float | None
    read_wait_share: float | None
    majflt_per_token: float | None
    peak_rss_bytes: int | None
    filling: bool


def figures(trials: Sequence[Trial]) -> Figures:
    """The figures of one side's trials, of which there is at least one."""
    seconds = [second for trial in trials for second in trial.decode_s]
    count = len(seconds)
    hits, lookups = (total([total(getattr(t, name)) for t in trials]) for name in ("hits", "lookups"))
    read, waited, faults = (
        total([total(getattr(t, name)) for t in trials]) for name in ("bytes", "read_wait_s", "majflt")
    )
    token_s = spread([trial.token_s for trial in trials])
    peaks = [trial.peak_rss_bytes for trial in trials if trial.peak_rss_bytes is not None]
    return Figures(
        trials=len(trials),
        token_s=token_s,
        tok_s=token_s.inverse(),
        slowest_s=sorted(seconds)[min(count - 1, (95 * count) // 100)],
        prefill_s=spread([trial.prefill_s for trial in trials]),
        open_s=spread([trial.open_s for trial in trials]),
        hit_rate=hits / lookups if hits is not None and lookups else None,
        bytes_per_token=None if read is None else read / count,
        read_wait_s=None if waited is None else waited / count,
        read_wait_share=None if waited is None else waited / sum(seconds),
        majflt_per_token=None if faults is None else faults / count,
        peak_rss_bytes=max(peaks) if peaks else None,
        filling=any(_filling(trial) for trial in trials),
    )


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def _filling(trial: Trial) -> bool:
    used = trial.run.get("resolved", {}).get("cache", {}).get("used")
    lookups, hits = total(trial.lookups) or 0, total(trial.hits) or 0
    return bool(used) and lookups > hits and not total(trial.evictions)
