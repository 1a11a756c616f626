"""Prompts, the hash of a run and the one line of an error, for the tests of what can fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import bmoe
from bmoe import BmoeError, Conversation

PROFILE = {"model": {"threads": 1, "ctx": 256, "ubatch": 16}, "cache": {"policy": "lru"}}
PROMPT = [5, 300, 301, 7, 280, 412, 33]
LONG = [(i * 37 + 11) % 512 for i in range(50)]
EVICTING = "cache.budget_mb=1.5"


def run(conversation: Conversation, prompt: Sequence[int] = PROMPT, n: int = 6) -> str:
    assert n == len(list(conversation.generate(prompt, n, hash_logits=True)))
    assert conversation.summary is not None
    assert conversation.summary.logits_sha256 is not None
    return conversation.summary.logits_sha256


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    return text


def stop_of(conversation: Conversation) -> str:
    assert conversation.summary is not None
    return conversation.summary.stop


def expect(error: type[BmoeError], model: str, *overrides: str, profile: dict[str, Any] | None = None) -> str:
    with pytest.raises(error) as caught:
        bmoe.open(profile or PROFILE, model, overrides)
    return one_line(caught.value)
