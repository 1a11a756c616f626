"""The resident run: plain llama.cpp with the same model in a process of its own, given the same tokens.

It is the identity reference of a profile: the same context, batch width, threads and KV, nothing streamed and nothing
lossy. One request is one line of JSON on the standard input of ``python -m bmoe.evaluate.reference``, answered by one
line on its standard output; the line that announces logits is followed by their bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from bmoe.conversation import Conversation
from bmoe.engine import Engine
from bmoe.errors import BmoeError, NativeError
from bmoe.plan import Plan
from bmoe.resolve import resolve

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LEFT_OUT = frozenset({"cache", "fetch", "prefetch", "draft", "routing", "loss", "sink", "trace", "serve"})


def resident(plan: Plan) -> dict[str, Any]:
    """The profile of the resident run: what streams, drafts or changes routing is left out, sizes are the plan's."""
    kept = {k: v for k, v in plan.profile.model_dump(mode="json").items() if k not in _LEFT_OUT and v is not None}
    sizes = {"path": plan.facts.path, "threads": plan.threads, "ctx": plan.ctx, "ubatch": plan.ubatch}
    return {**kept, "model": {**kept["model"], **sizes}, "stream": {"enabled": False}}


class Reference:
    """The process and one conversation in it; close it, or use it in a ``with`` block."""

    def __init__(self, plan: Plan) -> None:
        """Start it and wait until its model is open. Raises NativeError with what it said, if it ends instead."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,  # a Ctrl-C is for the process that can end in order
        )
        try:
            self._ask({"profile": resident(plan)})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def clear(self) -> None:
        """Forget all tokens."""
        self._ask({"do": "clear"})

    def feed(self, tokens: Sequence[int]) -> None:
        """Decode ``tokens`` after those it holds."""
        self._ask({"do": "feed", "tokens": list(tokens)})

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        self._ask({"do": "rewind", "length": length})

    def logits(self) -> NDArray[np.float32]:
        """The row after the last token, float32 [n_vocab]."""
        size = int(self._ask({"do": "logits"})["bytes"])
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise self._gone()
        return np.frombuffer(data, np.float32)

    def close(self) -> None:
        """End the process. May be called twice."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except OSError:
                    continue
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        try:
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()
            line = answers.readline()
        except OSError:
            raise self._gone() from None
        if not line.endswith(b"\n"):
            raise self._gone()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NativeError(f"the resident run failed: {answer['error']}")
        return answer

    def _gone(self) -> NativeError:
        code = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        how = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
        last = lines[-1] if lines else "it said nothing; perhaps the model does not fit in memory"
        return NativeError(f"the resident run {how}: {last}")


def _answer(pipe: IO[bytes], content: Mapping[str, Any], data: bytes = b"") -> None:
    pipe.write(json.dumps(content).encode() + b"\n" + data)
    pipe.flush()


def _do(conversation: Conversation, request: Mapping[str, Any], pipe: IO[bytes]) -> None:
    if request["do"] == "logits":
        data = conversation.logits().tobytes()
        _answer(pipe, {"bytes": len(data)}, data)
        return
    if request["do"] == "clear":
        conversation.clear()
    elif request["do"] == "feed":
        conversation.feed(request["tokens"])
    elif request["do"] == "rewind":
        conversation.rewind(request["length"])
    _answer(pipe, {})


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Open the model that the first request names, and do what the others say until there are no more."""
    first = requests.readline()
    if not first:
        return
    try:
        with Engine(resolve(json.loads(first)["profile"])) as engine, engine.conversation() as conversation:
            _answer(answers, {})
            for line in requests:
                _do(conversation, json.loads(line), answers)
    except BmoeError as error:
        _answer(answers, {"error": "; ".join(str(error).splitlines())})


if __name__ == "__main__":
    _own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not come between the answers
    try:
        serve(sys.stdin.buffer, _own)
    except BrokenPipeError:
        sys.exit(1)
