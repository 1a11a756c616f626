"""Worlds over files of random bytes, closed after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from .world import Build, Shape, World


@pytest.fixture(name="folder", scope="session")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(name="build")
def _build(folder: Path) -> Iterator[Build]:
    worlds: list[World] = []
    files: list[int] = []

    def build(shape: Shape, budget: int, max_mappings: int | None = None) -> World:
        _, nbytes = shape.banks()
        content = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
        path = folder / f"{nbytes}-{shape.start}.bin"
        if not path.exists():
            path.write_bytes(content)
        files.append(os.open(path, os.O_RDONLY))
        worlds.append(World(files[-1], content, shape, budget, max_mappings))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()
    for fd in files:
        os.close(fd)
