"""What holds for all tests: readable assertions in the modules that one folder shares, and a log of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

pytest.register_assert_rewrite(
    "tests.store.world", "tests.conversation.runs", "tests.failures.runs", "tests.native.nodes"
)


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    """What a command inside a test said of the log, the next test does not know of."""
    yield
    structlog.reset_defaults()
