"""A run of the chosen profile, to put what was measured beside what was predicted."""

from __future__ import annotations

import json
from pathlib import Path

from bmoe.bundled import bundled_sets
from bmoe.contracts import RunSummary
from bmoe.engine import open_engine
from bmoe.errors import ModelError
from bmoe.fit.verdict import Fit

_PROMPT_TOKENS = 192


def run(fit: Fit, model: str, overrides: tuple[str, ...], tokens: int, remember: Path | None = None) -> RunSummary:
    """Generate ``tokens`` tokens after a prompt of some two hundred from the bundled texts, and say what it took.

    The prompt fills the cache: from an empty one the first tokens would all miss. Raises what a run raises, and
    ModelError if it ended before there was a speed.
    """
    settings = [setting.override for setting in fit.choice.settings]
    with open_engine(fit.choice.name, model, [*settings, *overrides], remember=remember) as engine:
        room = max(1, min(_PROMPT_TOKENS, engine.plan.ctx - tokens - 1))
        with engine.conversation() as conversation:
            for _ in conversation.generate(engine.model.tokenize(_text())[:room], tokens):
                pass
            summary = conversation.summary
    if summary is None or summary.tok_s is None:
        raise ModelError(f"{model}: the run ended after too few tokens to have a speed; give more with -n")
    return summary


def _text() -> str:
    lines = bundled_sets()["heldout"].read_text(encoding="utf-8").splitlines()
    return " ".join(json.loads(line)["text"] for line in lines[:120])
