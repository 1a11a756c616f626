"""What every test of the command line in this process needs."""

from __future__ import annotations

import pytest
import structlog


@pytest.fixture(autouse=True)
def _fresh_log():
    """The command line sends the log to the stderr of its test, which is closed when that ends."""
    yield
    structlog.reset_defaults()
