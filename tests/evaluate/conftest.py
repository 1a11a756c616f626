"""A tiny model, small data sets on disk, and evaluations of them in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import bmoe
from bmoe import Engine
from bmoe.evaluate.datasets import read_dataset
from bmoe.evaluate.run import Evaluation, Settings
from bmoe.resolve import resolve
from bmoe.testing.models import TinyModels

PROFILE = {
    "model": {"threads": 1, "ctx": 64, "ubatch": 16},
    "fetch": {"plugin": "pread"},
    "cache": {"budget_mb": 2},
}
SHORT = Settings(tokens=6)


@pytest.fixture(name="models", scope="session")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(name="model", scope="session")
def _model(models: TinyModels) -> str:
    return str(models.path(locality=0.6))


@pytest.fixture(name="engine", scope="module")
def _engine(model: str) -> Iterator[Engine]:
    with bmoe.open(PROFILE, model=model) as engine:
        yield engine


@pytest.fixture(name="write")
def _write(tmp_path: Path) -> Callable[..., str]:
    def write(*records: Any, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), "utf-8")
        return str(path)

    return write


@pytest.fixture(name="prepare")
def _prepare(model: str, tmp_path: Path) -> Callable[..., Evaluation]:
    """An evaluation that is not yet entered; keywords are those of ``Settings`` and ``Evaluation``."""

    def prepare(
        data: str,
        settings: Settings = SHORT,
        overrides: Sequence[str] = (),
        limit: int | None = None,
        out: str = "replies.jsonl",
        path: str = model,
        **how: bool,
    ) -> Evaluation:
        plan = resolve(PROFILE, model=path, overrides=overrides)
        return Evaluation(plan, read_dataset(data, None, limit), settings, out=str(tmp_path / out), **how)

    return prepare
