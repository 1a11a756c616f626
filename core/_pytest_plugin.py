"""What pytest loads wherever bmoe is installed: readable assertions in the shipped gates, and their marker.

It lives outside ``bmoe.testing`` because pytest can only rewrite the assertions of modules that are not yet imported,
and it imports nothing else of the library, so that coverage sees the library's own import.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("bmoe.testing")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker of the gates, so that third parties may run with ``--strict-markers``."""
    config.addinivalue_line("markers", "gate: a compliance test that bmoe.testing ships for plugins of one kind")
