"""The in-tree sinks pass their gate, and what is true of each alone."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import sys
from pathlib import Path

import pytest
import structlog
from pydantic import ValidationError

from bmoe.errors import PluginError
from bmoe.telemetry import FanOut
from bmoe.testing.sinks import MEASURED, RUN, SUMMARY, TOKENS, UNMEASURED, SinkGates
from bmoe.testing.terminal import Screen, Terminal
from bmoe_plugins.sinks.jsonl import Jsonl, JsonlOptions
from bmoe_plugins.sinks.progress import Progress, ProgressOptions, column_after, progress_line


class Full(io.StringIO):
    """A file on a disk without room."""

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


class TestJsonlGates(SinkGates):
    plugin, provider = "bmoe", "jsonl"


class TestProgressGates(SinkGates):
    plugin, provider = "bmoe", "progress"


class TestCsvGates(SinkGates):
    plugin, provider = "bmoe", "csv"


class TestPrometheusGates(SinkGates):
    plugin, provider = "bmoe", "prometheus"
    options = {"path": "{folder}/bmoe.prom", "interval_s": 0}
    replaces = True


class TestJsonl:
    def test_one_json_object_a_line_in_order(self, tmp_path):
        path = tmp_path / "run.jsonl"
        sink = Jsonl(JsonlOptions(path=str(path)))
        sink.open(RUN)
        for record in TOKENS:
            sink.token(record)
        sink.close(SUMMARY)
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]

        assert ["run", "token", "token", "token", "summary"] == [line["event"] for line in lines]
        assert [1] * 5 == [line["schema"] for line in lines]
        assert (MEASURED.text, None) == (lines[2]["text"], lines[1]["decode_s"])

    def test_with_flush_a_token_is_in_the_file_at_once(self, tmp_path):
        path = tmp_path / "run.jsonl"
        sink = Jsonl(JsonlOptions(path=str(path), flush=True))
        sink.open(RUN)
        sink.token(MEASURED)
        written = path.read_text("utf-8")
        sink.close(None)

        assert 2 == written.count("\n")

    def test_a_path_that_cannot_be_written_is_refused_before_the_model_is_read(self, tmp_path):
        path = tmp_path / "missing" / "run.jsonl"

        with pytest.raises(PluginError, match=r'^options\.path = ".*run\.jsonl": No such file or directory; '):
            Jsonl(JsonlOptions(path=str(path)))

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_names_the_option_and_the_remedy(self):
        sinks = FanOut([Jsonl(JsonlOptions(path="/dev/full"))])

        with pytest.raises(PluginError) as caught:
            sinks.open(RUN)
        assert str(caught.value) == (
            'sink.0.options.path = "/dev/full": No space left on device; make room there, or name another file'
        )

    def test_a_disk_that_fills_during_a_run_names_the_option_and_the_run_goes_on(self, tmp_path):
        sink = Jsonl(JsonlOptions(path=str(tmp_path / "run.jsonl"), flush=True))
        sinks = FanOut([sink])
        sinks.open(RUN)
        sink._file.close()
        sink._file = Full()
        with structlog.testing.capture_logs() as logged:
            sinks.token(MEASURED)
            sinks.token(MEASURED)
            sinks.close(SUMMARY)

        assert ["sink.0.options.path"] == [entry["path"] for entry in logged]
        assert logged[0]["reason"].endswith("No space left on device; make room there, or name another file")

    def test_a_home_directory_is_not_guessed(self):
        with pytest.raises(ValidationError, match="only a shell expands"):
            JsonlOptions(path="~/run.jsonl")


@pytest.fixture(name="terminal")
def _terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with Terminal(40, 8) as terminal:
        yield terminal


def _stream(terminal, pieces, **options):
    """Text and progress on one terminal, as in a run; the terminal is closed, then its whole output is returned."""
    sink = Progress(ProgressOptions(interval_s=0, **options), terminal.stream)
    sink.open(RUN)
    for index, piece in enumerate(pieces):
        sink.token(dataclasses.replace(MEASURED, index=index, text=piece))
        terminal.stream.write(piece)
        terminal.stream.flush()
    return sink


PIECES = {
    "short lines": ["one ", "two\n", "three"],
    "scrolls": [f"line {n}\n" for n in range(30)],
    "ends at the margin": ["x" * 40, "y" * 5, "\n", "z" * 39, "w", "ab"],
    "longer than a line": ["q" * 100, "r" * 20, "s"],
    "many margins": ["0123456789"] * 60,
}


class TestProgress:
    @pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
    def test_text_on_the_same_terminal_is_not_torn(self, terminal, pieces):
        """Above the status row stands exactly the text, wrapped and scrolled as on a terminal of one row less."""
        sink = _stream(terminal, pieces)
        seen = Screen(40, 8).feed(terminal.close())
        alone = Screen(40, 7).feed("".join(pieces))
        sink.close(SUMMARY)

        assert alone.history + alone.lines == seen.history + seen.lines[:7]
        assert "token" in seen.lines[7]

    def test_the_row_is_given_back(self, terminal):
        sink = _stream(terminal, ["one ", "two"])
        sink.close(SUMMARY)
        seen = Screen(40, 8).feed(terminal.close())

        assert ["one two", *[""] * 7] == seen.lines
        assert (0, 7) == seen.region

    def test_a_change_of_size_moves_the_row(self, terminal):
        sink = _stream(terminal, ["one\n"])
        terminal.resize(60, 10)
        sink.token(MEASURED)
        terminal.stream.write("two\n")
        terminal.stream.flush()
        seen = Screen(60, 10).feed(terminal.close())
        sink.close(SUMMARY)

        assert (0, 8) == seen.region
        assert ["one", "two", *[""] * 7] == seen.lines[:9]
        assert "token" in seen.lines[9]

    def test_a_terminal_too_small_for_it_is_left_alone(self, terminal):
        terminal.resize(40, 3)
        sink = _stream(terminal, ["one ", "two"])
        sink.close(SUMMARY)

        assert "one two" == terminal.close()

    def test_what_is_not_a_terminal_gets_nothing(self):
        stream = io.StringIO()
        sink = Progress(ProgressOptions(interval_s=0), stream)
        sink.open(RUN)
        sink.token(MEASURED)
        sink.close(SUMMARY)

        assert "" == stream.getvalue()

    def test_a_dumb_terminal_gets_nothing(self, terminal, monkeypatch):
        monkeypatch.setenv("TERM", "dumb")
        sink = _stream(terminal, ["one"])
        sink.close(SUMMARY)

        assert "one" == terminal.close()

    def test_it_is_drawn_no_more_often_than_asked_for(self, terminal):
        sink = Progress(ProgressOptions(interval_s=60), terminal.stream)
        sink.open(RUN)
        for index in range(50):
            sink.token(dataclasses.replace(MEASURED, index=index, text=""))
        sink.close(SUMMARY)

        drawn = terminal.close()

        assert (1, 0) == (drawn.count("1 token"), drawn.count("tokens"))


class TestProgressLine:
    def test_figures_are_of_the_recent_decodes(self):
        line = progress_line(9, [dataclasses.replace(MEASURED, index=i) for i in range(4)]).plain

        assert "9 tokens · 4.0 tok/s · 75 % hits · 12.0 MiB/token · 25 % read wait + 12 % managing" == line

    def test_rounds_of_drafts_are_told_with_what_they_read_and_took(self):
        """Three tokens of one round, of which one came with the decode and two were drafted and accepted."""
        verified = dataclasses.replace(MEASURED, drafted=4, accepted=2, draft_s=0.25, draft_bytes=3 << 20)
        given = dataclasses.replace(UNMEASURED, index=2, decode_s=0.0, draft_s=0.0, demand_bytes=0, draft_bytes=0)
        line = progress_line(3, [verified, given, given]).plain

        assert "6.0 tok/s · 75 % hits · 5.0 MiB/token · 3.0 tokens/round, 50 % accepted · " in line
        assert line.endswith("12 % read wait + 6 % managing + 50 % drafting")

    def test_what_was_not_measured_is_left_out(self):
        assert "1 token" == progress_line(1, [UNMEASURED]).plain

    @pytest.mark.parametrize(
        ("column", "text", "expected"),
        [(0, "abc", 3), (3, "\n", 0), (0, "x" * 40, 40), (40, "y", 1), (39, "語", 2), (0, "\tx", 9), (39, "\t", 39)],
    )
    def test_the_column_is_followed(self, column, text, expected):
        assert expected == column_after(column, text, 40)


def test_the_sinks_write_to_the_stderr_of_their_construction(monkeypatch):
    """A process without stderr (closed by its parent) can still be built a progress sink."""
    from bmoe_plugins.sinks import progress

    monkeypatch.setattr(sys, "stderr", None)
    (provider,) = progress.bmoe_sinks()
    sink = provider.build(provider.options(), None)
    sink.open(RUN)
    sink.token(MEASURED)
    sink.close(SUMMARY)
