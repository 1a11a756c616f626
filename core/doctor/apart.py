"""Probes in processes of their own: what a sandbox kills or a drive never answers costs one line and not the rest.

A probe is a function of this package that is named by text, takes JSON and tells JSON, several times if it likes: what
it has told until it is ended counts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bmoe.errors import BmoeError

_GRACE_S = 1.0
_LEFT_BEHIND_S = 5
_CODE = "import sys; sys.path[:] = {path!r}; from bmoe.doctor.apart import answer; answer()"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe told, in order; ``failure`` says in words why it told no more, "" if it came to its end.

    ``raised`` if the probe itself said so, by an exception; otherwise it was ended, or never began.
    """

    told: list[Any] = field(default_factory=list)
    failure: str = ""
    raised: bool = False


def ask(probe: str, arguments: Sequence[Any], seconds: float) -> Answer:
    """Run ``module:function`` of this package with ``arguments`` for at most ``seconds``; never raises for its sake."""
    # isolated: a module in the current folder, or a setting in the environment, is not what is asked about
    code = _CODE.format(path=[entry for entry in sys.path if entry])
    command = [sys.executable, "-I", "-c", code, probe, json.dumps(list(arguments)), str(seconds)]
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except (OSError, ValueError) as error:
        return Answer(failure=f"no process could be started: {getattr(error, 'strerror', None) or error}")
    late = False
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        child.kill()
        out, err = _rest(child)
    except BaseException:
        child.kill()
        raise
    told, failure, raised = _read(out)
    if late:
        return Answer(told, f"no answer within {seconds:g} s")
    code_ = child.returncode
    if code_ and not failure:
        last = (err.decode(errors="replace").strip().splitlines() or [f"exit code {code_}"])[-1]
        failure = f"ended by {_signal(-code_)}" if code_ < 0 else last
    return Answer(told, failure, raised)


def _rest(child: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What a killed child had said. One that hangs inside the kernel is left behind."""
    try:
        return child.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired as error:
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        return error.output or b"", b""


def _read(out: bytes) -> tuple[list[Any], str, bool]:
    told, failure = [], ""
    for line in out.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # a line that was cut off
            kind, value = json.loads(line)
            if kind == "told":
                told.append(value)
            else:
                failure = str(value)
    return told, failure, bool(failure)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tell(value: Any) -> None:
    """From a probe: one thing that it found; a JSON value."""
    _say("told", value)


def answer() -> None:
    """The child's side: run the probe that the command line names."""
    probe, arguments, seconds = sys.argv[1:4]
    if hasattr(signal, "alarm"):
        signal.alarm(int(float(seconds)) + _LEFT_BEHIND_S)  # it ends also if nobody is there to end it
    module, _, function = probe.partition(":")
    try:
        found = getattr(importlib.import_module(f"bmoe.doctor.{module}"), function)(*json.loads(arguments))
        if found is not None:
            tell(found)
    except BmoeError as error:
        _say("failed", str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is an answer
        _say("failed", f"{type(error).__name__}: {error}")


def _say(kind: str, value: Any) -> None:
    sys.stdout.write(json.dumps([kind, value]) + "\n")
    sys.stdout.flush()
