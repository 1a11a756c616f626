"""A terminal for tests: a pseudo-terminal to write to, and a screen that shows what a person would see."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import threading
import tty
from types import TracebackType

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b([78DM=>])|([\x00-\x1f])|([^\x00-\x1f]+)", re.DOTALL)


class Terminal:
    """A pseudo-terminal of ``columns`` by ``rows``; ``stream`` writes to it, ``output`` is all that was written.

    A context manager; leaving it closes the stream and completes ``output``.
    """

    def __init__(self, columns: int = 60, rows: int = 12) -> None:
        self._reader, self.fd = os.openpty()
        tty.setraw(self.fd)
        self.resize(columns, rows)
        self.stream = open(self.fd, "w", encoding="utf-8", newline="", closefd=False)  # noqa: SIM115
        self._chunks: list[bytes] = []
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, as a person does who drags the window."""
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> str:
        """Close the stream and return all that was written. May be called twice."""
        if not self.stream.closed:
            self.stream.close()
            os.close(self.fd)
            self._thread.join()
            os.close(self._reader)
        return self.output

    @property
    def output(self) -> str:
        """What was written so far; complete once the terminal is closed."""
        return b"".join(self._chunks).decode("utf-8", "replace")

    def wait(self, seconds: float = 5.0) -> bool:
        """Wait until something has been written; whether it was."""
        return self._arrived.wait(seconds)

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._reader, 65536)
            except OSError:  # Linux says EIO when the other end is closed
                return
            if not data:
                return
            self._chunks.append(data)
            self._arrived.set()


class Screen:
    """What a terminal shows after ``feed``: enough of a VT100 for scrolling text and a status row.

    ``history`` are the lines that scrolled off the top. A wrap at the right margin is pending until the next
    character, and, as in tmux, a saved cursor forgets that it was pending.
    """

    def __init__(self, columns: int = 60, rows: int = 12) -> None:
        self.columns, self.rows = columns, rows
        self.history: list[str] = []
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._saved = (0, 0)
        self._top, self._bottom = 0, rows - 1

    def feed(self, text: str) -> Screen:
        """Process ``text``, as a terminal in raw output mode whose newline also returns the carriage."""
        for found in _TOKEN.finditer(text):
            parameters, final, escape, control, plain = found.groups()
            if final:
                self._sequence([int(part) if part.isdigit() else 0 for part in parameters.split(";")], final)
            elif escape:
                self._escape(escape)
            elif control:
                self._control(control)
            else:
                for char in plain:
                    self._put(char)
        return self

    @property
    def lines(self) -> list[str]:
        """The rows as they show, without trailing blanks."""
        return ["".join(row).rstrip() for row in self._cells]

    @property
    def region(self) -> tuple[int, int]:
        """First and last row of the scrolling region, from 0."""
        return self._top, self._bottom

    def _put(self, char: str) -> None:
        if self._column == self.columns:
            self._column = 0
            self._line_feed()
        self._cells[self._row][self._column] = char
        self._column += 1

    def _line_feed(self) -> None:
        if self._row == self._bottom:
            line = self._cells.pop(self._top)
            if self._top == 0:
                self.history.append("".join(line).rstrip())
            self._cells.insert(self._bottom, [" "] * self.columns)
        elif self._row < self.rows - 1:
            self._row += 1

    def _control(self, control: str) -> None:
        if control == "\n":
            self._column = 0
            self._line_feed()
        elif control == "\r":
            self._column = 0

    def _escape(self, escape: str) -> None:
        if escape == "7":
            self._saved = (self._row, min(self._column, self.columns - 1))
        elif escape == "8":
            self._row, self._column = self._saved
        elif escape == "D":
            self._line_feed()

    def _sequence(self, numbers: list[int], final: str) -> None:
        first = numbers[0]
        if final == "H":
            self._row = min(max(first, 1), self.rows) - 1
            self._column = min(max(numbers[1] if len(numbers) > 1 else 1, 1), self.columns) - 1
        elif final == "A":
            self._row = max(self._row - max(first, 1), 0)
        elif final == "K":
            start = 0 if first == 2 else self._column
            self._cells[self._row][start:] = [" "] * (self.columns - start)
        elif final == "J":
            self._cells[self._row][self._column :] = [" "] * (self.columns - self._column)
            self._cells[self._row + 1 :] = [[" "] * self.columns for _ in range(self._row + 1, self.rows)]
        elif final == "r":
            self._top = max(first, 1) - 1
            self._bottom = (numbers[1] if len(numbers) > 1 else self.rows) - 1
            self._row = self._column = 0
