"""llama.cpp's log lines: debug events of ours, with its errors kept for our own messages."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from bmoe.log import get_logger
from bmoe.native import lib

_ERROR, _CONTINUED = 4, 5
# llama.cpp says how large its buffers are in its log only; of its interface that is a C++ function
_BUFFER = re.compile(r"(\w+) buffer size = *([0-9.]+) MiB", re.ASCII)


class _Log:
    """The one log callback of the process, which llama.cpp keeps globally."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=20)
        self.buffers: Counter[str] = Counter()
        self._callback = lib.LogCallback(self._line)
        lib.llama().llama_log_set(self._callback, None)
        lib.llama().llama_backend_init()

    def _line(self, level: int, text: bytes | None, user: int | None) -> None:
        # never let an exception out: this is called from C
        with contextlib.suppress(Exception):
            line = (text or b"").decode(errors="replace").strip()
            if level == _ERROR and line:
                self.errors.append(line)
            if (told := _BUFFER.search(line)) is not None:
                self.buffers[told[1]] += round(float(told[2]) * (1 << 20))
            if line and level != _CONTINUED:
                # asked for each time: this object outlives any configuration of the log
                get_logger(source="llama.cpp").debug("llama.cpp said", line=line)


@functools.cache
def start() -> _Log:
    """Take over llama.cpp's log and initialise its backend, once per process."""
    return _Log()


@contextlib.contextmanager
def recent_errors() -> Iterator[deque[str]]:
    """The error lines that llama.cpp logs inside the block."""
    errors = start().errors
    errors.clear()
    yield errors


@contextlib.contextmanager
def recent_buffers() -> Iterator[Counter[str]]:
    """Bytes of the buffers that llama.cpp says it made inside the block, by kind: compute, output, KV, RS.

    Rounded to 0.01 MiB; empty where this version words it otherwise.
    """
    buffers = start().buffers
    buffers.clear()
    yield buffers


def reason(errors: Iterable[str]) -> str:
    """The last of llama.cpp's error lines that says why; its very last one is often only that it failed."""
    told = [line for line in errors if not line.endswith("failed to load model")]
    return told[-1] if told else "no reason given"
