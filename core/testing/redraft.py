"""Repeats recorded rounds of draft and verification without a drafter, as they were or with other rejected tokens.

In a process of its own it is the identity reference of a streamed run with drafts: plain llama.cpp, the same decodes.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bmoe.contracts import BatchContext, Proposal
from bmoe.conversation import Conversation
from bmoe.costs import DecodeCost
from bmoe.engine import Engine
from bmoe.errors import NativeError
from bmoe.native.model import Context
from bmoe.plan import Plan
from bmoe.resolve import resolve
from bmoe.testing.identity import resident
from bmoe.tree import Tree


@dataclass(slots=True)
class Round:
    """One decode after the prompt: its tokens, their parents, the SHA-256 of each one's logits, and which were kept.

    ``kept`` is empty for a plain decode of one token.
    """

    tokens: tuple[int, ...]
    parent: tuple[int, ...]
    rows: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()

    @property
    def tree(self) -> Tree:
        """What was verified."""
        above = tuple(parent - 1 for parent in self.parent[1:])
        return Tree.of(self.tokens[0], Proposal(self.tokens[1:], above))


class DraftRecorder(Engine):
    """An engine that notes every round of its conversations; guesses of the model itself are no rounds."""

    def __init__(self, plan: Plan, *, seam: str = "auto") -> None:
        self.rounds: list[Round] = []
        super().__init__(plan, seam=seam)

    def decode(
        self, context: Context, tokens: Sequence[int], batch: BatchContext, cancelled: Callable[[], bool]
    ) -> DecodeCost:
        """Decode; of a single token of the text, note it."""
        cost = super().decode(context, tokens, batch, cancelled)
        if batch.phase == "decode":
            self.rounds.append(Round(tuple(tokens), (-1,), (_hash(context, -1),)))
        return cost

    def verify(self, context: Context, tree: Tree, batch: BatchContext, cancelled: Callable[[], bool]) -> DecodeCost:
        """Verify and note."""
        cost = super().verify(context, tree, batch, cancelled)
        rows = tuple(_hash(context, row) for row in range(len(tree.tokens)))
        self.rounds.append(Round(tree.tokens, tree.parent, rows))
        return cost

    def keep(self, context: Context, path: int, kept: Sequence[int], length: int) -> tuple[bool, int]:
        """Keep and note."""
        self.rounds[-1].kept = tuple(kept)
        return super().keep(context, path, kept, length)


def repeat(
    engine: DraftRecorder, conversation: Conversation, prompt: Sequence[int], rounds: Sequence[Round]
) -> list[tuple[str, ...]]:
    """Decode prompt and rounds again on a conversation of ``engine``, from empty; the hashes of each round's rows."""
    conversation.clear()
    conversation.feed(prompt)
    engine.rounds.clear()
    for each in rounds:
        conversation.verify(each.tree)
        if each.kept:
            conversation.keep(each.tree, each.kept)
    return [each.rows for each in engine.rounds]


def with_other_drafts(rounds: Sequence[Round], n_vocab: int) -> list[Round]:
    """The same rounds with other tokens wherever a draft was rejected."""
    return [
        Round(
            tuple(
                token if not each.kept or index in each.kept else (token * 7 + index + 1) % n_vocab
                for index, token in enumerate(each.tokens)
            ),
            each.parent,
            each.rows,
            each.kept,
        )
        for each in rounds
    ]


def reference(table: Mapping[str, Any], prompt: Sequence[int], rounds: Sequence[Round]) -> list[tuple[str, ...]]:
    """What plain llama.cpp computes in these rounds, in a process of its own. NativeError if that fails."""
    job = {"profile": resident(table), "prompt": list(prompt), "rounds": [asdict(each) for each in rounds]}
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=json.dumps(job), capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NativeError(f"the identity reference ended with {done.returncode}: {reason}")
    return [tuple(rows) for rows in json.loads(done.stdout)]


def _hash(context: Context, row: int) -> str:
    return hashlib.sha256(context.logits(row).tobytes()).hexdigest()


def _reference(job: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rounds = [Round(*(tuple(each[name]) for name in ("tokens", "parent", "rows", "kept"))) for each in job["rounds"]]
    engine = DraftRecorder(resolve(job["profile"]))
    with engine, engine.conversation() as conversation:
        if engine.stream is not None:
            raise NativeError("the identity reference must run without streaming")
        return repeat(engine, conversation, job["prompt"], rounds)


if __name__ == "__main__":
    json.dump(_reference(json.load(sys.stdin)), sys.stdout)
