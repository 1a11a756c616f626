"""Show a live line at the bottom of the terminal while text streams above it.

The text goes to stdout and belongs to somebody else, so the line may not depend on where the cursor is. It lives in the
terminal's last row, outside the scrolling region (DECSTBM), and is drawn between a save and a restore of the cursor:
whatever is written meanwhile, by this process or by another one in the pipe, scrolls above it untouched.
Only at the right margin is a restored cursor not the same in every terminal: while the text is there, nothing is drawn.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from pydantic import Field
from rich.cells import get_character_cell_size
from rich.console import Console
from rich.text import Text

from bmoe import hookimpl
from bmoe.contracts import Facts, Options, Provider, RunRecord, RunSummary, Sink, TokenRecord

_MIB = 1024 * 1024
_SAVE, _RESTORE, _ERASE = "\x1b7", "\x1b8", "\x1b[2K"
_MAKE_ROOM = "\x1bD\x1b[A"  # down one line (scrolls on the last one) and up again, in the same column
_FEWEST_ROWS, _FEWEST_COLUMNS = 4, 20


class ProgressOptions(Options):
    """Options of the ``progress`` sink."""

    interval_s: float = Field(default=0.1, ge=0, le=60, description="least seconds between two drawings of the line")
    window: int = Field(default=32, ge=1, le=10_000, description="tokens that the figures are taken over")


class Progress:
    """The live line; silent where ``stream`` is not a terminal that can do it."""

    def __init__(self, options: ProgressOptions, stream: TextIO) -> None:
        self._stream = stream
        self._interval_s = options.interval_s
        self._recent: deque[TokenRecord] = deque(maxlen=options.window)
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._able = stream.isatty() and not self._console.is_dumb_terminal and os.name == "posix"
        self._size = (0, 0)
        self._tokens = self._column = 0
        self._started = self._drawn = 0.0
        self._lock = threading.Lock()
        self._first = threading.Event()
        self._ticker: threading.Thread | None = None

    def open(self, run: RunRecord, /) -> None:
        """Take the last row and show that the prompt is being read."""
        if not self._able:
            return
        self._recent.clear()
        self._tokens = self._column = 0
        self._started, self._drawn = time.monotonic(), 0.0
        atexit.register(self._release)
        self._draw(self._waiting())
        self._first.clear()
        self._ticker = threading.Thread(target=self._tick, name="bmoe-progress", daemon=True)
        self._ticker.start()

    def token(self, record: TokenRecord, /) -> None:
        """Count the token; draw if the last drawing is old enough."""
        if not self._able:
            return
        self._stop_ticker()
        self._tokens += 1
        if record.index > 0:  # the first token's decode is the prompt's
            self._recent.append(record)
        now, width, before = time.monotonic(), self._size[0], self._column
        self._column = column_after(before, record.text, width)
        at_margin = width > 0 and width in (before, self._column)  # the text may be written before this call or after
        if now - self._drawn >= self._interval_s and not at_margin:
            self._drawn = now
            self._draw(progress_line(self._tokens, self._recent))

    def close(self, summary: RunSummary | None, /) -> None:
        """Give the last row back."""
        self._stop_ticker()
        self._release()
        atexit.unregister(self._release)

    def _waiting(self) -> Text:
        return Text(f"reading the prompt, {time.monotonic() - self._started:.0f} s", style="dim")

    def _tick(self) -> None:
        while not self._first.wait(1.0):
            self._draw(self._waiting())

    def _stop_ticker(self) -> None:
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            self._first.set()
            ticker.join()

    def _draw(self, line: Text) -> None:
        with self._lock:
            try:
                columns, rows = os.get_terminal_size(self._stream.fileno())
            except OSError:
                return
            room = self._reserve(columns, rows)
            if self._size == (0, 0):
                return
            line.truncate(columns - 1, overflow="ellipsis")
            with self._console.capture() as captured:
                self._console.print(line, end="")
            self._write(f"{room}{_SAVE}\x1b[{rows};1H{_ERASE}{captured.get()}{_RESTORE}")

    def _reserve(self, columns: int, rows: int) -> str:
        """The sequence that takes the last row of a terminal of this size; empty if it is taken already."""
        if (columns, rows) == self._size:
            return ""
        before = self._give_back((columns, rows))
        if rows < _FEWEST_ROWS or columns < _FEWEST_COLUMNS:
            self._write(before)
            self._size = (0, 0)
            return ""
        self._size = (columns, rows)
        return f"{before}{_MAKE_ROOM}{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}"

    def _give_back(self, size: tuple[int, int]) -> str:
        """The sequence that frees the row on a terminal that now has ``size``."""
        if self._size == (0, 0):
            return ""
        if size == self._size:
            return f"{_SAVE}\x1b[r\x1b[{size[1]};1H{_ERASE}{_RESTORE}"
        # after a change of size the row may be anywhere, but all that is below the text is ours
        return f"{_SAVE}\x1b[r{_RESTORE}\x1b[J"

    def _release(self) -> None:
        with self._lock:
            try:
                size = tuple(os.get_terminal_size(self._stream.fileno()))
            except (OSError, ValueError):
                size = self._size
            with contextlib.suppress(OSError, ValueError):  # the terminal may be gone, and its row with it
                self._write(self._give_back((size[0], size[1])))
            self._size = (0, 0)

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()


def progress_line(tokens: int, recent: Sequence[TokenRecord]) -> Text:
    """The line after ``tokens`` tokens, its figures over the ``recent`` ones; what was not measured is left out."""
    parts = [Text.assemble((f"{tokens} {'token' if tokens == 1 else 'tokens'}", "bold"))]
    seconds = sum(_known([r.decode_s for r in recent])) + sum(_known([r.draft_s for r in recent]))
    if seconds > 0:
        parts.append(Text(f"{len(recent) / seconds:.1f} tok/s", style="green"))
    lookups, hits = sum(_known([r.lookups for r in recent])), sum(_known([r.hits for r in recent]))
    if lookups > 0:
        last = recent[-1].hit_rate
        overall = "" if last is None else f" ({100 * last:.0f} % in all)"
        parts.append(Text(f"{100 * hits / lookups:.0f} % hits{overall}", style="cyan"))
    read = _known([r.demand_bytes for r in recent])
    if read:
        drafting = sum(_known([r.draft_bytes for r in recent]))
        parts.append(Text(f"{(sum(read) + drafting) / len(read) / _MIB:.1f} MiB/token"))
    rounds = _known([r.accepted for r in recent])
    if rounds:
        share = 100 * sum(rounds) / max(1.0, sum(_known([r.drafted for r in recent])))
        parts.append(Text(f"{1 + sum(rounds) / len(rounds):.1f} tokens/round, {share:.0f} % accepted", style="cyan"))
    lost = _known([r.lost_mass for r in recent])
    if lost:
        parts.append(Text(f"{100 * sum(lost) / len(lost):.1f} % mass lost", style="magenta"))
    spent = [
        ("read wait", [r.read_wait_s for r in recent]),
        ("managing", [r.manage_s for r in recent]),
        ("drafting", [r.draft_s for r in recent]),
    ]
    shares = [f"{100 * sum(_known(s)) / seconds:.0f} % {what}" for what, s in spent if seconds > 0 and _known(s)]
    if shares:
        parts.append(Text(" + ".join(shares), style="yellow"))
    line = parts[0]
    for part in parts[1:]:
        line = line.append(" · ", style="dim").append_text(part)
    return line


def column_after(column: int, text: str, width: int) -> int:
    """The column after writing ``text`` from ``column`` on lines of ``width`` cells; ``width`` itself is the margin."""
    for char in text:
        if char == "\n":
            column = 0
        elif char == "\t":
            column = min((column // 8 + 1) * 8, max(width - 1, 0))
        else:
            cells = get_character_cell_size(char) if char.isprintable() else 1  # shown as a symbol
            column = cells if column + cells > width else column + cells
    return column


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _build(options: ProgressOptions, facts: Facts) -> Progress:
    return Progress(options, sys.stderr or io.StringIO())


@hookimpl
def bmoe_sinks() -> Sequence[Provider[Sink]]:
    """The ``progress`` sink."""
    return [Provider("progress", _build, ProgressOptions, summary="a live line on the terminal: speed, hits, reads")]
