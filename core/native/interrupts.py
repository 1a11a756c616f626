"""Ctrl-C around calls into llama.cpp that call back into Python: it waits until the call has returned.

An exception that a signal handler raises inside a ctypes callback is printed and lost, and C goes on.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """Yield a callable that says whether a Ctrl-C is waiting; it is delivered when the block ends.

    Callbacks should ask, and end the call early. Does nothing outside the main thread, where no signal arrives, and
    where SIGINT has no handler in Python.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: False
        return
    waiting: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
    try:
        yield lambda: bool(waiting)
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            signal.raise_signal(signal.SIGINT)
