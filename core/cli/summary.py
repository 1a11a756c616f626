"""The end of a text run, in a few lines for a person."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from bmoe.contracts import RunRecord, RunSummary

_MIB = 1024 * 1024


def print_summary(summary: RunSummary, run: RunRecord, console: Console) -> None:
    """Print what ``summary`` measured, what made it slow, and every notice of ``run``; plain where no terminal is."""
    if console.is_terminal:
        console.print()
    for parts in (speed(summary), reads(summary), drafts(summary), wiring(summary)):
        line = Text()
        for part in parts:
            line.append(" · " if line else "", style="dim").append(part)
        if line:
            console.print(line, soft_wrap=True)
    if summary.ahead_note:
        text = f"read-ahead is off: {summary.ahead_note}"
        if summary.ahead_off_tokens:
            text += f" (it was for {_count(summary.ahead_off_tokens, 'token')})"
        console.print(Text(text, style="yellow"), soft_wrap=True)
    for cause in summary.causes or ():
        text = f"slow: {cause.name}, {100 * cause.share:.0f} % of the time: {cause.seen}; {cause.remedy}"
        console.print(Text(text, style="yellow"), soft_wrap=True)
    if summary.lossy:
        mark = "lossy: the output may differ from that of the resident model"
        if summary.worst_lost_mass is not None:
            mean = "" if summary.lost_mass is None else f"{100 * summary.lost_mass:.2f} % per token and "
            mark += f"; of the router's mass {mean}{100 * summary.worst_lost_mass:.2f} % by the worst token was lost"
        console.print(Text(mark, style="bold magenta"), soft_wrap=True)
    for notice in run.notices:
        console.print(Text(f"notice: {notice}", style="yellow"), soft_wrap=True)


def speed(summary: RunSummary) -> Iterator[str]:
    """How fast it went, and why it ended."""
    yield _count(summary.tokens, "token")
    if summary.tok_s is not None:
        yield f"{summary.tok_s:.2f} tok/s"
    yield f"{_count(summary.prompt_tokens, 'prompt token')} in {summary.prefill_s:.2f} s"
    yield f"ended by {summary.stop}"


def reads(summary: RunSummary) -> Iterator[str]:
    """What was read: in all, and during decode."""
    if summary.direct_io is None:
        yield "experts not streamed"
        return
    yield f"{summary.bytes_read / _MIB:.1f} MiB of experts read"
    if summary.bytes_per_token is not None:
        yield f"{summary.bytes_per_token / _MIB:.2f} MiB/token"
    if summary.hit_rate is not None:
        yield f"hit rate {100 * summary.hit_rate:.1f} %"
    if summary.io_wait_s is not None and summary.decode_s > 0:
        yield f"read wait {100 * summary.io_wait_s / summary.decode_s:.0f} %"
    if summary.ahead_bytes:
        share = 100 * (summary.ahead_used_bytes or 0) / summary.ahead_bytes
        yield f"{summary.ahead_bytes / _MIB:.1f} MiB read ahead, {share:.0f} % of it used"
    yield "direct I/O" if summary.direct_io else "buffered I/O"


def drafts(summary: RunSummary) -> Iterator[str]:
    """What drafts came to; nothing without a drafter."""
    if summary.drafted is None:
        return
    if summary.accepted_length is None:
        yield "drafts: none was verified"
    else:
        yield f"drafts: {summary.accepted_length:.1f} tokens per round"
        share = 100 * (summary.accepted or 0) / max(1, summary.drafted)
        rates = ", ".join(f"{rate:.2f}" for rate in summary.acceptance or () if rate is not None)
        yield f"{share:.0f} % accepted ({rates})"
    if summary.bytes_per_output_token is not None:
        yield f"{summary.bytes_per_output_token / _MIB:.2f} MiB/token with drafting"
    if summary.draft_off_rounds:
        yield f"off for {_count(summary.draft_off_rounds, 'round')}"


def wiring(summary: RunSummary) -> Iterator[str]:
    """What it took and how it was wired."""
    if summary.peak_rss_bytes is not None:
        yield f"peak memory {summary.peak_rss_bytes / _MIB:.0f} MiB"
    if summary.cache_budget_bytes:
        yield f"cache {summary.cache_held_bytes / _MIB:.0f} of {summary.cache_budget_bytes / _MIB:.0f} MiB"
        if summary.preloaded_bytes:
            yield f"{summary.preloaded_bytes / _MIB:.1f} MiB preloaded"
    else:
        yield "cache off"
    yield f"seam {summary.seam}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
