"""Ctrl-C during a generation: ask it to stop, at once, and let it end in order.

While llama.cpp computes, the main thread is in C and a Python signal handler would wait for the end of the token.
Python's own C handler however writes to the wake-up descriptor immediately; a thread that reads it passes the request
on, so that the abort callback sees it at the next node.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """A context in which SIGINT and SIGTERM call ``cancel`` (from any thread); a second one raises KeyboardInterrupt.

    ``exit_code`` is None while there was none, else 130 or 143. Outside the main thread it does nothing.
    """

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.exit_code: int | None = None
        self._cancel = cancel
        self._previous: dict[signal.Signals, Any] = {}
        self._wakeup = -1
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, writer = self._ends = socket.socketpair()
        writer.setblocking(False)
        self._thread = threading.Thread(target=self._pass_on, args=(reader,), name="bmoe-interrupt", daemon=True)
        self._thread.start()
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        self._wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends is None or self._thread is None:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        reader, writer = self._ends
        writer.close()  # the thread reads the end of the stream
        self._thread.join()
        reader.close()
        self._ends = self._thread = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.exit_code is not None
        self.exit_code = 128 + number
        if again:
            raise KeyboardInterrupt
        self._cancel()

    def _pass_on(self, reader: socket.socket) -> None:
        while number := reader.recv(1):
            if number[0] in _SIGNALS:
                self._cancel()
