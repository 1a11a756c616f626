"""Runs with a dense placement, here and in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import bmoe

PROFILE: dict[str, Any] = {"model": {"threads": 1, "ctx": 64, "ubatch": 16}, "cache": {"budget_mb": 0}}
PROMPT = [5, 300, 301, 7, 280, 412, 33]


def opened(model: str | Path, placement: str, *overrides: str) -> bmoe.Engine:
    return bmoe.open(PROFILE, str(model), [f"dense.placement={placement}", *overrides])


def run(model: str | Path, placement: str, *overrides: str) -> str:
    with opened(model, placement, *overrides) as engine:
        return generate(engine)


def generate(engine: bmoe.Engine) -> str:
    with engine.conversation() as conversation:
        assert len(list(conversation.generate(PROMPT, 4, hash_logits=True))) == 4
        assert conversation.summary is not None
        assert conversation.summary.logits_sha256 is not None
        return conversation.summary.logits_sha256


def in_a_process(program: str) -> list[str]:
    """Lines that ``program`` prints; it has ``opened`` and ``generate``."""
    before = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
    code = before + "from tests.dense.runs import opened, generate\n" + program
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
