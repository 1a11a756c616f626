"""A bench for a person: tables for a terminal, rows of Markdown, and verdicts in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bmoe.bench.compare import Comparison
from bmoe.bench.figures import Figures
from bmoe.bench.result import Result

_MIB = 1024 * 1024
_SPEED = ("side", "tok/s", "quartiles", "s/token", "slowest 5 %", "ratio", "interval")
_READS = ("side", "hit rate", "MiB/token", "read wait", "major faults/token", "prompt", "open", "peak memory")

Table = tuple[Sequence[str], list[Sequence[str]]]


def plain(result: Result) -> Iterator[Table]:
    """Two tables: how fast every side is, and what it read for that."""
    measured = [(index, found) for index in range(len(result.sides)) if (found := result.figures(index)) is not None]
    yield _SPEED, [(result.sides[i].label, *_speed(f), *_ratio(result, i)) for i, f in measured]
    yield _READS, [(result.sides[i].label, *_reads(f)) for i, f in measured]


def markdown(result: Result) -> Iterator[str]:
    """One table with a row for each side; those that failed have a row without figures."""
    columns = (
        "side",
        "tok/s",
        "s/token",
        "ratio (interval)",
        "verdict",
        "hit rate",
        "MiB/token",
        "read wait",
        "trials",
    )
    yield "| " + " | ".join(columns) + " |"
    yield "|---" + "|---:" * (len(columns) - 1) + "|"
    for index, side in enumerate(result.sides):
        found, compared = result.figures(index), result.comparison(index) if index else None
        label = side.label.replace("\\", "\\\\").replace("|", "\\|").replace("`", "'")
        if found is None:
            cells = ["-"] * (len(columns) - 1)
        else:
            ratio, interval = _ratio(result, index)
            hit, read, wait = _reads(found)[:3]
            speed = _speed(found)
            verdict = "baseline" if not index else "?" if compared is None else compared.verdict or "none"
            both = ratio if not index else f"{ratio} ({interval})"
            cells = [f"{speed[0]} ({speed[1]})", speed[2], both, verdict, hit, read, wait, str(found.trials)]
        yield "| " + " | ".join([f"`{label}`", *cells]) + " |"


def verdicts(result: Result) -> Iterator[str]:
    """What may be said of every side beside the first, in a sentence each."""
    base = result.sides[0].label
    for index, side in enumerate(result.sides[1:], 1):
        compared = result.comparison(index)
        if compared is None:
            yield f"{side.label}: not compared, as it has no round in common with {base}"
        else:
            yield f"{side.label}: {_sentence(compared, base)}"


def notes(result: Result) -> Iterator[str]:
    """What limits the conclusions, and whether all was measured."""
    yield from (f"notice: {line}" for line in result.remarks())
    if not result.complete:
        wanted = result.settings.rounds * len(result.sides)
        yield f"interrupted: {len(result.trials)} of {wanted} measurements were made"
    for index, failure in result.failures.items():
        if failure.round:
            label = result.sides[index].label
            yield f"notice: {label} failed in round {failure.round + 1}; its figures are of the rounds before"


def _sentence(compared: Comparison, base: str) -> str:
    if compared.verdict is not None:
        times = compared.ratio if compared.verdict == "faster" else 1 / compared.ratio
        return f"{compared.verdict} than {base}, {times:.2f} times ({_interval(compared)})"
    if compared.pairs < compared.pairs_needed:
        return f"no verdict: that needs {compared.pairs_needed} pairs, and there are {compared.pairs}"
    return f"no verdict: a difference from {base} is not shown ({_interval(compared)})"


def _speed(found: Figures) -> tuple[str, str, str, str]:
    tok_s, token_s = found.tok_s, found.token_s
    quartiles = f"{_short(tok_s.low)}-{_short(tok_s.high)}"
    return _short(tok_s.median), quartiles, _short(token_s.median), _short(found.slowest_s)


def _ratio(result: Result, index: int) -> tuple[str, str]:
    compared = result.comparison(index) if index else None
    if compared is None:
        return ("1" if not index else "?"), ("baseline" if not index else "?")
    return f"{compared.ratio:.3f}", _interval(compared)


def _interval(compared: Comparison) -> str:
    if compared.low is None or compared.high is None:
        return "?"
    return f"{compared.low:.3f}-{compared.high:.3f}"


def _reads(found: Figures) -> tuple[str, ...]:
    return (
        "?" if found.hit_rate is None else f"{100 * found.hit_rate:.1f} %",
        "?" if found.bytes_per_token is None else f"{found.bytes_per_token / _MIB:.2f}",
        "?" if found.read_wait_share is None else f"{100 * found.read_wait_share:.0f} %",
        "?" if found.majflt_per_token is None else f"{found.majflt_per_token:.1f}",
        f"{_short(found.prefill_s.median)} s",
        f"{_short(found.open_s.median)} s",
        "?" if found.peak_rss_bytes is None else f"{found.peak_rss_bytes / _MIB:.0f} MiB",
    )


def _short(value: float) -> str:
    """Three digits that count, never as a power of ten."""
    if value <= 0:
        return "0"
    return f"{value:.{min(6, max(0, 2 - math.floor(math.log10(value))))}f}"
