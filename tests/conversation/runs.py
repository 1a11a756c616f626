"""Prompts, budgets and what a finished generation gave, for the tests of conversations on a real tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bmoe import Conversation, Engine

OFF, SOME = "cache.budget_mb=0", "cache.budget_mb=2"
PROMPT = [5, 300, 301, 7, 280, 412, 33]
LONG = [(i * 37 + 11) % 512 for i in range(50)]


Open = Callable[..., Engine]


def run(conversation: Conversation, prompt: str | Sequence[int], n: int, **how: bool) -> tuple[list[int], str | None]:
    """Token ids and the hash of their logits."""
    tokens = [token.id for token in conversation.generate(prompt, n, hash_logits=True, **how)]
    assert conversation.summary is not None
    return tokens, conversation.summary.logits_sha256


def stop_of(conversation: Conversation) -> str:
    assert conversation.summary is not None
    return conversation.summary.stop
