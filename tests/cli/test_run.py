"""One generation by the command line: what goes where, and every way that it can end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bmoe.testing.terminal import Screen, Terminal

FAKE = Path(__file__).with_name("fake_engine.py")
BASE = ("--profile", "demo", "-p", "abc")


def command(*arguments):
    return [sys.executable, str(FAKE), *arguments]


def bmoe(*arguments, **options):
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(command(*arguments), capture_output=True, timeout=60, check=False, **options)


class TestText:
    def test_text_is_on_stdout_and_the_summary_on_stderr(self):
        done = bmoe(*BASE, "--model", "ok", "-n", "5")

        assert (0, b"abcab\n") == (done.returncode, done.stdout)
        lines = done.stderr.decode().splitlines()
        assert "5 tokens · 2 prompt tokens in 0.50 s · ended by length" == lines[0]
        assert "24.0 MiB of experts read · 12.00 MiB/token · hit rate 75.0 % · read wait 25 % · direct I/O" == lines[1]
        assert "peak memory 100 MiB · cache 32 of 64 MiB · seam python" == lines[2]
        assert "notice: the budget became 64 MiB" == lines[3]

    def test_text_comes_as_it_is_generated(self):
        """The first characters can be read while the process waits for us."""
        process = subprocess.Popen(command(*BASE, "--model", "slow"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        first = process.stdout.read(2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)

        assert b"ab" == first

    def test_a_character_that_the_terminal_lacks_does_not_end_the_run(self):
        env = {**os.environ, "PYTHONIOENCODING": "ascii"}
        done = bmoe("--profile", "demo", "--model", "ok", "-p", "aé", "-n", "3", env=env)

        assert (0, b"a?a\n") == (done.returncode, done.stdout)

    def test_escape_sequences_do_not_reach_a_terminal_but_a_file(self):
        arguments = ("--profile", "demo", "--model", "ok", "-p", "a\x1b[2J", "-n", "5")
        with Terminal() as terminal:
            subprocess.run(command(*arguments), stdout=terminal.fd, stderr=subprocess.DEVNULL, timeout=60, check=True)
            shown = terminal.close()

        assert "a␛[2J\n" == shown.replace("\r", "")
        assert b"a\x1b[2J\n" == bmoe(*arguments).stdout

    def test_the_summary_on_a_terminal_is_set_apart(self):
        with Terminal(100, 12) as terminal:
            arguments = command(*BASE, "--model", "ok", "-n", "3")
            env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
            subprocess.run(arguments, stdout=terminal.fd, stderr=terminal.fd, timeout=60, check=True, env=env)
            lines = Screen(100, 12).feed(terminal.close()).lines

        assert ["abc", ""] == lines[:2]
        assert lines[2].startswith("3 tokens · ")


class TestJson:
    def test_run_then_tokens_then_summary(self):
        done = bmoe(*BASE, "--model", "ok", "-n", "2", "--json", "--set", "cache.budget_mb=48")
        events = [json.loads(line) for line in done.stdout.splitlines()]

        assert ["run", "token", "token", "summary"] == [event["event"] for event in events]
        assert {1} == {event["schema"] for event in events}
        assert 48 == events[0]["profile"]["cache"]["budget_mb"]
        assert ["a", "b"] == [event["text"] for event in events[1:3]]
        assert b"" == done.stderr

    def test_the_summary_has_what_scripts_rely_on(self):
        done = bmoe(*BASE, "--model", "ok", "-n", "2", "--json")
        summary = json.loads(done.stdout.splitlines()[-1])

        names = (
            "event tokens tok_s prefill_s decode_s hit_rate bytes_read bytes_per_token io_wait_s peak_rss_bytes "
            "dense_bytes cache_budget_bytes direct_io seam lossy logits_sha256 schema"
        )
        assert set() == set(names.split()) - set(summary)
        assert (None, None) == (summary["tok_s"], summary["logits_sha256"])

    def test_the_hash_is_there_when_asked_for(self):
        done = bmoe(*BASE, "--model", "ok", "-n", "2", "--json", "--hash-logits")

        assert "ab" * 32 == json.loads(done.stdout.splitlines()[-1])["logits_sha256"]


class TestEnds:
    def test_a_failed_read_is_one_line_and_1_and_what_was_generated_stays(self):
        done = bmoe(*BASE, "--model", "fails")
        lines = done.stderr.decode().splitlines()

        assert (1, b"abc\n") == (done.returncode, done.stdout)
        assert "bmoe: m.gguf: read of 4096 bytes at 8192 failed: Input/output error (5)" == lines[-1]
        assert lines[0].endswith("ended by error")
        assert "Traceback" not in done.stderr.decode()

    def test_a_failed_read_leaves_a_summary_in_json(self):
        done = bmoe(*BASE, "--model", "fails", "--json")
        summary = json.loads(done.stdout.splitlines()[-1])

        assert (1, "summary", "error", 3) == (done.returncode, summary["event"], summary["stop"], summary["tokens"])

    def test_a_defect_keeps_its_traceback(self):
        done = bmoe(*BASE, "--model", "bug")

        assert 1 == done.returncode
        assert b"Traceback" in done.stderr
        assert b"ZeroDivisionError: a defect" in done.stderr

    @pytest.mark.parametrize("model", ["slow", "stuck"])
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_an_interrupt_leaves_the_text_and_a_summary(self, model, number, code):
        """Even while the main thread is in C, where Python's own handlers do not run."""
        process = subprocess.Popen(command(*BASE, "--model", model), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        first = process.stdout.read(2)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)

        assert (code, b"ab\n") == (process.returncode, first + out)
        assert "ended by cancelled" in err.decode().splitlines()[0]
        assert b"Traceback" not in err

    def test_an_interrupt_leaves_a_summary_in_json(self):
        process = subprocess.Popen(
            command(*BASE, "--model", "slow", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        summary = json.loads((b"".join(lines) + out).splitlines()[-1])

        assert (130, "cancelled", 2) == (process.returncode, summary["stop"], summary["tokens"])

    def test_a_reader_that_leaves_is_no_error(self):
        arguments = command(*BASE, "--model", "ok", "-n", "100000")
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.read(1)
            process.stdout.close()
            err = process.stderr.read()

        assert (0, b"") == (process.returncode, err)

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_is_one_line_and_1(self):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                command(*BASE, "--model", "ok", "-n", "3"), stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
            )

        assert 1 == done.returncode
        assert b"bmoe: standard output: No space left on device" in done.stderr
        assert b"Traceback" not in done.stderr

    def test_a_closed_stdout_is_one_line_and_1(self):
        done = subprocess.run(
            command(*BASE, "--model", "ok", "-n", "3"),
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
            preexec_fn=lambda: os.close(1),
        )

        assert 1 == done.returncode
        assert b"bmoe: standard output is closed" in done.stderr


class TestPrompt:
    def test_standard_input_is_taken_as_it_is(self):
        done = bmoe("--profile", "demo", "--model", "ok", "-p", "-", "-n", "4", stdin=None, input="zé\n".encode())

        assert "zé\nz\n".encode() == done.stdout

    def test_a_dash_can_begin_a_prompt(self):
        assert b"-x\n" == bmoe("--profile", "demo", "--model", "ok", "--prompt=-x", "-n", "2").stdout

    @pytest.mark.parametrize("closed", [True, False])
    def test_no_standard_input_is_an_empty_prompt(self, closed):
        before = (lambda: os.close(0)) if closed else None
        done = bmoe("--profile", "demo", "--model", "ok", "-p", "-", preexec_fn=before)

        assert 2 == done.returncode
        assert done.stderr.decode().startswith("bmoe: standard input is empty; give some text")
        assert 1 == done.stderr.count(b"\n")

    def test_standard_input_that_is_not_utf8_names_the_byte(self):
        done = bmoe("--profile", "demo", "--model", "ok", "-p", "-", stdin=None, input=b"ab\xffcd")

        assert 2 == done.returncode
        assert b"bmoe: standard input is not UTF-8 at byte 2 (0xff); convert it" in done.stderr

    def test_an_argument_that_is_not_utf8_names_the_character(self):
        done = bmoe("--profile", "demo", "--model", "ok", "-p", b"ab\xff")

        assert 2 == done.returncode
        assert b"bmoe: the prompt is not UTF-8 at character 2; convert it" in done.stderr

    def test_an_empty_argument_is_an_error(self):
        done = bmoe("--profile", "demo", "--model", "ok", "-p", "")

        assert 2 == done.returncode
        assert done.stderr.decode().startswith("bmoe: the prompt is empty; give some text")
