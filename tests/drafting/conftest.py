"""A tiny model with a head, and trunks that a head follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bmoe.testing.models import TinyModels

from .headed import Followed, planned


@pytest.fixture(name="headed", scope="session")
def _headed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a head."""
    return TinyModels(tmp_path_factory.mktemp("headed")).path("tiny-glm4moe", "F32")


@pytest.fixture(name="followed")
def _followed(headed: Path) -> Iterator[Callable[..., Followed]]:
    """Opens trunks with their heads."""
    with ExitStack() as stack:

        def make(path: Path = headed, *, seam: str = "auto", watched: bool = False, **sections: dict) -> Followed:
            found = Followed(planned(path, **sections), seam, watched=watched)
            stack.callback(found.close)
            return found

        yield make
