"""Set-up for every test: where the tests live, how hypothesis runs on a busy machine, where the checkout is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent

# A module found under these folders by path would be imported as `core` or `plugins`, beside the real `bmoe`.
collect_ignore = ["core", "plugins"]

# A deadline per example measures the machine's load, not the code.
settings.register_profile("bmoe", deadline=None, print_blob=True)
settings.load_profile("bmoe")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT
