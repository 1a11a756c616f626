"""One worker from the outside: started, listened to, and ended in bounded time, whatever it does."""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

PROGRAM = (sys.executable, "-m", "bmoe.bench.worker")
_GRACE_S = 3.0
_LONGEST = 64 << 20  # bytes of a line; a worker that writes more is broken


class SideFailed(Exception):  # noqa: N818 - the side failed, the bench did not
    """A worker gave no measurement; ``kind`` is a word for a report, the text a line for a person."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind = kind
        super().__init__(reason)


class Child:
    """Runs one request; use in a ``with`` block, at whose end no process is left. :meth:`kill` is for any thread."""

    def __init__(self, request: Mapping[str, Any], *, silence_s: float, program: Sequence[str] = PROGRAM) -> None:
        """Start the worker. It is ended if it says nothing for ``silence_s`` seconds."""
        self._request, self._silence = request, silence_s
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed at exit
        # a group of its own: Ctrl-C on the terminal is for the parent, which then ends this one
        self._process = subprocess.Popen(
            list(program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )

        self.pid = self._process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        process = self._process
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()  # the end of its input ends a worker
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._stderr.close()

    def kill(self) -> None:
        """End the worker now."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def measured(self) -> dict[str, Any]:
        """What the worker measured. Raises :class:`SideFailed` in one line for any other end."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; its exit code tells why
            stdin.write(json.dumps(self._request).encode() + b"\n")
            stdin.flush()
        for line in self._lines():
            try:
                event = json.loads(line)
                kind = event["event"]
            except (ValueError, TypeError, KeyError) as error:
                raise SideFailed("protocol", f"the process wrote what is no answer: {line[:80]!r}") from error
            if kind == "measured":
                return dict(event)
            if kind == "failed":
                raise SideFailed(str(event.get("kind")), str(event.get("reason")))
        raise SideFailed(*self._end())

    def _lines(self) -> Any:
        """Lines as they come, to the end of the output. Raises :class:`SideFailed` after too long a silence."""
        stdout = self._process.stdout
        assert stdout is not None
        held = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            until = time.monotonic() + self._silence
            while True:
                if not selector.select(max(0.0, until - time.monotonic())):
                    self.kill()
                    raise SideFailed("timeout", f"said nothing for {self._silence:g} s and was ended; raise --timeout")
                piece = stdout.read1(1 << 16)  # type: ignore[attr-defined]
                if not piece:
                    return
                until = time.monotonic() + self._silence
                *lines, held = (held + piece).split(b"\n")
                yield from lines
                if len(held) > _LONGEST:
                    raise SideFailed("protocol", "the process wrote a line without an end")

    def _end(self) -> tuple[str, str]:
        """Kind and reason of an end without an answer."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return "protocol", "the process closed its output and went on"
        if code >= 0:
            return "exit", f"the process ended with {code}{self._last_words()}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if -code == signal.SIGKILL:
            return "killed", "the process was killed (SIGKILL), as is done when memory is short; lower cache.budget_mb"
        return "signal", f"the process was ended by {name}{self._last_words()}"

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {said[:300]}" if said else ""
