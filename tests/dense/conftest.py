"""Tiny models, and the hash of a run with its weights where llama.cpp maps them."""

from __future__ import annotations

import pytest

from bmoe.testing.models import TinyModels

from .runs import run


@pytest.fixture(name="models", scope="session")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(name="model", scope="session")
def _model(models: TinyModels) -> str:
    return str(models.path())


@pytest.fixture(name="mapped", scope="session")
def _mapped(model: str) -> str:
    return run(model, "mmap")
