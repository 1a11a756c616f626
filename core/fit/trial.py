"""A run of the chosen profile, to put what was measured beside what was predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from bmoe.bundled import bundled_sets
from bmoe.costs import DecodeCost
from bmoe.engine import open_engine
from bmoe.errors import ModelError

_PROMPT_TOKENS = 192


def run(profile: str, model: str, overrides: Sequence[str], tokens: int, remember: Path | None = None) -> DecodeCost:
    """Decode ``tokens`` tokens one by one after a prompt of some two hundred, and say what they took together.

    Prompt and tokens are of the bundled texts: what a model would say may end after two tokens, or go round in a
    circle of few experts. The prompt fills the cache: from an empty one the first tokens would all miss. Raises what a
    run raises, and ModelError if the context has no room for them.
    """
    with open_engine(profile, model, overrides, remember=remember) as engine:
        room = min(_PROMPT_TOKENS, engine.plan.ctx - tokens)
        if room < 1:
            raise ModelError(f"{model}: {tokens} tokens do not fit into a context of {engine.plan.ctx}; give fewer")
        text = list(islice(cycle(engine.model.tokenize(_text())), room + tokens))
        total = DecodeCost()
        with engine.conversation() as conversation:
            conversation.feed(text[:room])
            for token in text[room:]:
                total.add(conversation.feed([token], "decode"))
                engine.relieve()
    return total


def _text() -> str:
    lines = bundled_sets()["heldout"].read_text(encoding="utf-8").splitlines()
    return " ".join(json.loads(line)["text"] for line in lines[:120])
