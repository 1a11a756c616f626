"""What is measured at a position, and what the figures of all items together become."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.evaluate.bootstrap import interval

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Metric:
    """A mean: the sum of the items' ``total`` over the sum of their ``count`` (None: each item counts once)."""

    name: str
    formats: tuple[str, ...]
    total: str
    count: str | None
    meaning: str
    exponential: bool = False
    paired: bool = False


_ALL = ("text", "choice", "gsm8k")
METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("perplexity", ("text",), "nll", "tokens", "exp of nll", exponential=True),
        Metric("nll", ("text",), "nll", "tokens", "negative log-likelihood, nats per token"),
        Metric("accuracy", ("choice",), "right", None, "share of questions whose answer is the likeliest choice"),
        Metric("accuracy_norm", ("choice",), "right_norm", None, "the same by log-likelihood per byte of the choice"),
        Metric("exact_match", ("gsm8k",), "right", None, "share of problems whose final number is right"),
        Metric("agreement", _ALL, "agree", "compared", "share of positions with the resident argmax", paired=True),
        Metric("kl", _ALL, "kl", "compared", "KL(resident ‖ run), nats per position", paired=True),
        Metric("nll_delta", ("text",), "nll_delta", "tokens", "nll of the run less that of resident", paired=True),
    )
}
"""Every metric by name; those that are ``paired`` need the resident run."""


def metrics_of(format_: str, *, paired: bool) -> list[str]:
    """The metrics that a format has."""
    return [m.name for m in METRICS.values() if format_ in m.formats and (paired or not m.paired)]


def log_softmax(row: NDArray[Any]) -> NDArray[np.float64]:
    """Log-probabilities, float64, of a row of logits."""
    shifted = row.astype(np.float64)
    shifted -= shifted.max()
    shifted -= math.log(np.exp(shifted).sum())
    return shifted


def divergence(reference: NDArray[np.float64], run: NDArray[np.float64]) -> float:
    """KL(reference ‖ run) in nats, of two rows of log-probabilities; exactly 0 for equal rows and never below."""
    likely = reference > -np.inf
    p = reference[likely]
    return max(0.0, float(np.sum(np.exp(p) * (p - run[likely]))))


def mean(scores: Sequence[Mapping[str, float]], name: str) -> float | None:
    """A metric over the ``scores`` of some items; None where there is nothing."""
    totals, counts = _parts(METRICS[name], scores)
    return _value(METRICS[name], math.fsum(totals) / math.fsum(counts)) if totals else None


def aggregate(scores: Sequence[Mapping[str, float]], name: str, seed: int = 0) -> dict[str, Any]:
    """``value``, the ends ``low`` and ``high`` of its 95 % interval, and ``n``: what the mean is over.

    ``scores`` are those of the items, which are resampled as a whole; ``items`` counts those that have anything to say.
    All three figures are None where nothing was scored, the ends also where there is one item.
    """
    metric = METRICS[name]
    totals, counts = _parts(metric, scores)
    low, high = interval(totals, counts, seed=seed) or (None, None)
    return {
        "value": mean(scores, name),
        "low": None if low is None else _value(metric, low),
        "high": None if high is None else _value(metric, high),
        "n": int(sum(counts)),
        "items": len(totals),
    }


def _parts(metric: Metric, scores: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    pairs = [(s[metric.total], s[metric.count] if metric.count else 1) for s in scores if metric.total in s]
    return [total for total, count in pairs if count], [count for _, count in pairs if count]


def _value(metric: Metric, ratio: float) -> float:
    return _exp(ratio) if metric.exponential else ratio


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def common_prefix(rows: Iterable[Sequence[int]]) -> int:
    """How many leading tokens all of ``rows`` have in common."""
    count = 0
    for tokens in zip(*rows, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count
