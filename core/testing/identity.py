"""Records the float32 logits of every decode, of a streamed run here and of plain llama.cpp in a process of its own.

The identity reference of a profile is the same profile with ``stream.enabled = false``: same batch width, same threads,
no eval hook. Logits are compared by the hash of each row, so that a difference names the first decode that has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bmoe.contracts import BatchContext
from bmoe.conversation import Conversation
from bmoe.costs import DecodeCost
from bmoe.engine import Engine
from bmoe.errors import LogitsError, NativeError
from bmoe.native.model import Context
from bmoe.plan import Plan
from bmoe.resolve import resolve

MAX_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Generation:
    """``tokens`` that were chosen, and the SHA-256 of the last logits row of each decode, the prompt's parts first."""

    tokens: tuple[int, ...]
    rows: tuple[str, ...]


class RecordingEngine(Engine):
    """An engine that hashes the logits of every decode that succeeds."""

    def __init__(self, plan: Plan, *, seam: str = "auto") -> None:
        self.rows: list[str] = []
        super().__init__(plan, seam=seam)

    def decode(
        self, context: Context, tokens: Sequence[int], batch: BatchContext, cancelled: Callable[[], bool]
    ) -> DecodeCost:
        """Decode and hash."""
        cost = super().decode(context, tokens, batch, cancelled)
        self.rows.append(hashlib.sha256(context.logits().tobytes()).hexdigest())
        return cost

    def generate(self, conversation: Conversation, prompt: Sequence[int], max_tokens: int = MAX_TOKENS) -> Generation:
        """What ``conversation`` generates from an empty KV."""
        self.rows.clear()
        tokens: list[int] = []
        with contextlib.suppress(LogitsError):  # the rows up to there say where they differ from the reference's
            for token in conversation.generate(prompt, max_tokens):
                tokens.append(token.id)  # noqa: PERF401 (what was generated before an error is kept)
        return Generation(tuple(tokens), tuple(self.rows))


def resident(table: Mapping[str, Any]) -> dict[str, Any]:
    """The identity reference of a profile; what only steers streaming is left out, for it has no effect.

    ``dense`` stays: a placement that rearranges weights does so without streaming too.
    """
    kept = {key: value for key, value in table.items() if key not in {"cache", "fetch", "sink"}}
    return {**kept, "stream": {"enabled": False}}


@dataclass(slots=True)
class References:
    """Generations of plain llama.cpp, kept by profile and prompts: one process for each."""

    known: dict[str, tuple[Generation, ...]] = field(default_factory=dict)

    def of(
        self, table: Mapping[str, Any], prompts: Sequence[Sequence[int]], max_tokens: int = MAX_TOKENS
    ) -> tuple[Generation, ...]:
        """What the identity reference of ``table`` generates for each prompt. NativeError if its process fails."""
        job = json.dumps(
            {"profile": resident(table), "prompts": [list(p) for p in prompts], "max_tokens": max_tokens},
            sort_keys=True,
        )
        if job not in self.known:
            command = [sys.executable, "-m", __name__]
            done = subprocess.run(command, input=job, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
                raise NativeError(f"the identity reference ended with {done.returncode}: {reason}")
            self.known[job] = tuple(
                Generation(tuple(found["tokens"]), tuple(found["rows"])) for found in json.loads(done.stdout)
            )
        return self.known[job]


def difference(got: Generation, expected: Generation, prompt_tokens: int, ubatch: int) -> str:
    """Where two generations part, in words, or ""."""
    parts = -(-prompt_tokens // ubatch)
    for index, (mine, theirs) in enumerate(zip(got.rows, expected.rows, strict=False)):
        if mine != theirs:
            step = f"part {index + 1} of {parts} of the prompt" if index < parts else f"token {index - parts + 1}"
            mine_next, theirs_next = _token(got, index, parts), _token(expected, index, parts)
            return (
                f"logits first differ after {step} (decode {index + 1} of {len(expected.rows)}): {mine[:12]} is not "
                f"{theirs[:12]}; the next token is {mine_next} and should be {theirs_next}"
            )
    if len(got.rows) != len(expected.rows) or got.tokens != expected.tokens:
        return f"{len(got.rows)} decodes gave {got.tokens}, the reference took {len(expected.rows)}: {expected.tokens}"
    return ""


def _token(generation: Generation, decode: int, parts: int) -> int | None:
    index = decode - parts + 1
    return generation.tokens[index] if 0 <= index < len(generation.tokens) else None


def _reference(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    engine = RecordingEngine(resolve(job["profile"]))
    with engine:
        if engine.stream is not None or engine.seam.banks:
            raise NativeError("the identity reference must run without streaming and without an eval hook")
        for prompt in job["prompts"]:
            with engine.conversation() as conversation:
                generation = engine.generate(conversation, prompt, job["max_tokens"])
            found.append({"tokens": generation.tokens, "rows": generation.rows})
    return found


if __name__ == "__main__":
    json.dump(_reference(json.load(sys.stdin)), sys.stdout)
