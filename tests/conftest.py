"""Readable assertions in the modules that the tests of one folder share."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.store.world", "tests.conversation.runs", "tests.failures.runs", "tests.native.nodes"
)
