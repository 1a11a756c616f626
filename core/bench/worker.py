"""The process that measures one side once: opens the model, decodes, answers in JSON lines, ends.

Reads one request from standard input and writes lines with an ``event``: ``opened``, ``alive`` now and then, and at the
end ``measured`` or ``failed``. It ends at once when standard input does, so that no parent can leave it behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from bmoe.errors import BmoeError, LogitsError, ModelError
from bmoe.log import configure_logging
from bmoe.telemetry import record_json

if TYPE_CHECKING:
    from bmoe.conversation import Conversation
    from bmoe.costs import DecodeCost
    from bmoe.engine import Engine

ALIVE_S = 5.0
"""A line is written between two tokens if none was for so long."""

_Say = Callable[[Mapping[str, Any]], None]


def main() -> int:
    """Serve one request; the exit code is that of the error, if there was one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    configure_logging("error", colors=False)

    def say(event: Mapping[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with, args=(sys.stdin,), name="bmoe-bench-parent", daemon=True).start()
    try:
        _serve(request, say)
    except BmoeError as error:
        reason = str(error).splitlines()[0]
        say({"event": "failed", "kind": type(error).__name__, "reason": reason})
        return error.exit_code
    except MemoryError:
        say({"event": "failed", "kind": "MemoryError", "reason": "out of memory; lower cache.budget_mb or model.ctx"})
        return 1
    return 0


def _end_with(parent: TextIO) -> None:
    while parent.readline():
        continue
    os._exit(1)


def _serve(request: Mapping[str, Any], say: _Say) -> None:
    from bmoe.engine import open_engine

    remember = Path(request["remember"]) if request["remember"] else None
    with (
        open_engine(
            request["profile"], model=request["model"], overrides=request["overrides"], remember=remember
        ) as engine,
        engine.conversation() as conversation,
    ):
        say({"event": "opened"})
        say({"event": "measured", **measure(engine, conversation, request, lambda: say({"event": "alive"}))})


def measure(
    engine: Engine, conversation: Conversation, request: Mapping[str, Any], alive: Callable[[], None]
) -> dict[str, Any]:
    """Decode the request's ``prompt``, ``warmup`` tokens that count for nothing, and ``tokens`` that are measured.

    The tokens are those of ``given`` if its prompt and vocabulary are this model's, else the most probable one each
    time that does not end the text. Raises ModelError if they do not fit into the context, LogitsError if the model
    computes what is no number.
    """
    prompt = engine.model.tokenize(request["prompt"])
    count = request["warmup"] + request["tokens"]
    needed, held = len(prompt) + count, engine.plan.ctx
    if needed > held:
        raise ModelError(
            f"prompt, warm-up and {request['tokens']} tokens need a context of {needed}; raise model.ctx (now {held}), "
            "or ask for fewer with -n"
        )
    given = _matching(request["given"], prompt, engine.model.n_vocab)
    fed = conversation.feed(prompt)
    alive()
    tokens: list[int] = []
    choices: list[int] = []
    costs: list[DecodeCost] = []
    faults: list[int | None] = []
    said = time.monotonic()
    engine.process.sample()
    for index in range(count):
        choices.append(_greedy(engine, conversation))
        tokens.append(choices[-1] if given is None else given[index])
        costs.append(conversation.feed(tokens[-1:], "decode"))
        faults.append(engine.process.sample().majflt)
        engine.relieve()
        if time.monotonic() - said > ALIVE_S:
            alive()
            said = time.monotonic()
    warm, measured = costs[: request["warmup"]], costs[request["warmup"] :]
    return {
        "prompt_ids": prompt,
        "n_vocab": engine.model.n_vocab,
        "given": given is not None,
        "tokens": tokens,
        "choices": choices,
        "logits_sha256": hashlib.sha256(conversation.logits().tobytes()).hexdigest(),
        "open_s": engine.open_s,
        "prefill_s": fed.decode_s,
        "peak_rss_bytes": engine.process.peak_rss_bytes(),
        "warmup_s": [cost.decode_s for cost in warm],
        "decode_s": [cost.decode_s for cost in measured],
        "read_wait_s": [cost.read_wait_s for cost in measured],
        "manage_s": [cost.manage_s for cost in measured],
        "hits": [cost.hits for cost in measured],
        "lookups": [cost.lookups for cost in measured],
        "bytes": [None if c.read_bytes is None else c.read_bytes + (c.ahead_bytes or 0) for c in measured],
        "evictions": [cost.evictions for cost in measured],
        "majflt": faults[request["warmup"] :],
        "run": {**record_json(engine.record), "shape": _shape(engine)},
    }


def _matching(given: Mapping[str, Any] | None, prompt: Sequence[int], n_vocab: int) -> Sequence[int] | None:
    if given is None or given["n_vocab"] != n_vocab or given["prompt_ids"] != list(prompt):
        return None
    tokens: Sequence[int] = given["tokens"]
    return tokens


def _greedy(engine: Engine, conversation: Conversation) -> int:
    import numpy as np

    row = conversation.logits()
    while True:
        token = int(np.argmax(row))
        if not np.isfinite(row[token]):
            raise LogitsError(f"{engine.facts.path}: the logits are not numbers")
        if not engine.model.is_end(token):
            return token
        row[token] = -np.inf


def _shape(engine: Engine) -> dict[str, int]:
    """What of the model matters to a figure and tells nothing of where it lies."""
    facts = engine.facts
    return {
        "n_layer": facts.n_layer,
        "n_expert": facts.n_expert,
        "n_used": facts.n_used,
        "n_embd": facts.n_embd,
        "n_vocab": facts.n_vocab,
        "file_bytes": facts.file_bytes,
        "expert_bytes": facts.expert_bytes,
        "dense_bytes": facts.dense_bytes,
        "cycle_bytes": facts.cycle_bytes,
    }


if __name__ == "__main__":
    raise SystemExit(main())
