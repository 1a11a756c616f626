"""A tiny model and the hashes of its fresh runs."""

from __future__ import annotations

import pytest

import bmoe
from bmoe.testing.models import TinyModels

from .runs import LONG, PROFILE, run


@pytest.fixture(name="models", scope="session")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(name="model", scope="session")
def _model(models: TinyModels) -> str:
    return str(models.path())


@pytest.fixture(name="expected", scope="session")
def _expected(model: str) -> dict[str, str]:
    """The hashes of fresh runs, by prompt."""
    with bmoe.open(PROFILE, model, ["cache.budget_mb=0"]) as engine, engine.conversation() as conversation:
        return {"PROMPT": run(conversation), "LONG": run(conversation, LONG)}
