"""What llama.cpp says never reaches the standard output, however the log was set up in between."""

import io

import structlog

import bmoe
from bmoe.log import configure_logging
from bmoe.testing.models import TinyModels


def test_a_log_that_was_set_up_and_reset_stays_quiet(tmp_path, capfd):
    model = str(TinyModels(tmp_path).path("tiny-qwen3moe", "Q8_0"))
    said = io.StringIO()
    configure_logging("debug", stream=said)
    try:
        bmoe.open({"cache": {"budget_mb": 0}}, model).close()
    finally:
        structlog.reset_defaults()
    assert "llama.cpp said" in said.getvalue()
    bmoe.open({"cache": {"budget_mb": 0}}, model).close()
    assert ("", "") == tuple(capfd.readouterr())
