"""Engines over one tiny model, closed after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import bmoe
from bmoe import Engine
from bmoe.testing.models import TinyModels

from .runs import Open

PROFILE = {"model": {"threads": 1, "ctx": 256, "ubatch": 16}, "fetch": {"plugin": "pread"}}


@pytest.fixture(name="model", scope="session")
def _model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TinyModels(tmp_path_factory.mktemp("models")).path())


@pytest.fixture(name="opened")
def _opened(model: str) -> Iterator[Open]:
    engines: list[Engine] = []

    def opened(*overrides: str, path: str = model) -> Engine:
        engines.append(bmoe.open(PROFILE, model=path, overrides=overrides))
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()
