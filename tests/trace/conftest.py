"""Traced and untraced runs of tiny models, and the texts that they write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bmoe
from bmoe.testing.models import TinyModels

PROMPT = [3, 41, 7, 100, 12, 9, 5, 77]
Run = Callable[..., Any]


@pytest.fixture(name="models", scope="session")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(name="run")
def _run(models: TinyModels) -> Run:
    """Generate once; the summary, the tokens' ids, and the closed engine."""

    def run(*overrides: str, like: str = "tiny-qwen3moe", seam: str = "auto", tokens: int = 12) -> Any:
        profile = {"model": {"threads": 1, "ctx": 256, "ubatch": 16}, "fetch": {"plugin": "pread"}}
        with bmoe.open(profile, str(models.path(like)), overrides=overrides, seam=seam) as engine:
            conversation = engine.conversation()
            ids = [token.id for token in conversation.generate(PROMPT, tokens, hash_logits=True)]
        return conversation.summary, ids, engine

    return run


@pytest.fixture(name="traces")
def _traces(tmp_path: Path) -> Callable[..., list[str]]:
    """Overrides that write these kinds of traces into the test's folder."""

    def traces(*kinds: str, detail: str = "layer") -> list[str]:
        return [*(f'trace.{kind}="{tmp_path / kind}.csv"' for kind in kinds), f"trace.detail={detail}"]

    return traces
