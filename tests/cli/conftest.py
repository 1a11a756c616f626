"""What every test of the command line in this process needs."""

from __future__ import annotations

import pytest
import structlog

from bmoe.cli import main


@pytest.fixture(autouse=True)
def _fresh_log():
    """The command line sends the log to the stderr of its test, which is closed when that ends."""
    yield
    structlog.reset_defaults()


@pytest.fixture(name="bmoe")
def _bmoe(request, capsys):
    """Runs the command line in this process, the module's ``COMMAND`` if it has one: exit code, output, errors."""
    words = [command] if (command := getattr(request.module, "COMMAND", "")) else []

    def call(*arguments):
        code = main([*words, *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
