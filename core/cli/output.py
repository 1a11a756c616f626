"""Standard output and standard error: text as it comes, JSON lines, errors in one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bmoe.errors import BmoeError

_SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_SYMBOLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def emit(text: str) -> None:
    """Write ``text`` to stdout and flush it.

    Characters that the terminal's encoding lacks become question marks. Raises BrokenPipeError when the reader is gone
    and :class:`BmoeError` when stdout is closed or cannot be written.
    """
    out = sys.stdout
    if out is None:
        raise BmoeError("standard output is closed; redirect it to a file or to /dev/null")
    try:
        try:
            out.write(text)
        except UnicodeEncodeError:
            out.write(text.encode(out.encoding or "utf-8", "replace").decode(out.encoding or "utf-8"))
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        raise BmoeError(f"standard output: {error.strerror or error}") from error


def emit_generated(text: str) -> None:
    """Write generated text as :func:`emit` does; on a terminal its control characters show as symbols.

    A model may generate any byte, and an escape sequence would move the cursor, or worse.
    """
    emit(text.translate(_SYMBOLS) if sys.stdout is not None and sys.stdout.isatty() else text)


def emit_json(record: Mapping[str, Any] | Sequence[Any], *, indent: int | None = None) -> None:
    """Write one JSON value and a newline to stdout."""
    emit(json.dumps(record, indent=indent) + "\n")


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to stdout: laid out for a terminal, aligned columns elsewhere."""
    if sys.stdout is not None and sys.stdout.isatty():
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, overflow="fold", no_wrap=index == 0)
        for row in rows:
            table.add_row(*row)
        console = Console(highlight=False, markup=False)
        with console.capture() as captured:
            console.print(table)
        emit(captured.get())
        return
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        emit("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def complain(message: str) -> None:
    """Write ``message`` to stderr, each line with the program's name in front and nothing that a terminal acts on."""
    if sys.stderr is not None:
        for line in message.split("\n"):
            shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
            print(f"bmoe: {shown}", file=sys.stderr)


def abandon_stdout() -> None:
    """Point stdout at nothing, so that what is still buffered cannot fail again when Python exits."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):
        return
