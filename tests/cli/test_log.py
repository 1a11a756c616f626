"""Logging: who gets lines, in which form, and from which level on."""

from __future__ import annotations

import io
import json

import pytest

from bmoe.log import LEVELS, configure_logging, get_logger


class Tty(io.StringIO):
    def isatty(self):
        return True


class TestConfigured:
    def test_a_file_gets_one_json_object_a_line(self):
        stream = io.StringIO()
        configure_logging("info", stream=stream)
        get_logger(run="r1").info("model opened", seconds=0.5)

        line = json.loads(stream.getvalue())
        assert {"event": "model opened", "level": "info", "run": "r1", "seconds": 0.5}.items() <= line.items()
        assert 1 == stream.getvalue().count("\n")

    def test_a_terminal_gets_a_line_for_a_person(self):
        stream = Tty()
        configure_logging("info", stream=stream, colors=False)
        get_logger().info("model opened", seconds=0.5)

        assert "model opened seconds=0.5" in stream.getvalue()
        assert "\x1b" not in stream.getvalue()

    def test_colours_are_for_terminals(self):
        stream = Tty()
        configure_logging("info", stream=stream)
        get_logger().info("model opened")

        assert "\x1b[" in stream.getvalue()

    @pytest.mark.parametrize("level", LEVELS)
    def test_less_than_the_level_is_left_out(self, level):
        stream = io.StringIO()
        configure_logging(level, stream=stream)
        logger = get_logger()
        for name in LEVELS:
            getattr(logger, name)(name)

        seen = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
        assert list(LEVELS[LEVELS.index(level) :]) == seen

    def test_an_exception_keeps_its_traceback(self):
        stream = io.StringIO()
        configure_logging("error", stream=stream)
        try:
            raise ZeroDivisionError("a defect")
        except ZeroDivisionError:
            get_logger().exception("failed")

        assert "ZeroDivisionError: a defect" in json.loads(stream.getvalue())["exception"]

    def test_an_unknown_level_is_refused(self):
        with pytest.raises(ValueError, match="'loud' is not a log level"):
            configure_logging("loud")


class TestLibrary:
    def test_without_configuration_only_warnings_are_said_and_never_on_stdout(self, capsys):
        logger = get_logger(part="x")
        logger.info("quiet")
        logger.warning("loud")
        captured = capsys.readouterr()

        assert "" == captured.out
        assert "loud" in captured.err
        assert "quiet" not in captured.err
