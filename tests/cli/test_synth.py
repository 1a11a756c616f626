"""``bmoe synth``: wrong arguments name their option, and an interrupt leaves nothing."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from bmoe.cli import main
from bmoe.cli import synth as command
from bmoe.synth import write as write_module
from bmoe.testing.terminal import Terminal

LIKE = ("--like", "tiny-qwen3moe", "--layers", "1")


COMMAND = "synth"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--layers", "0"], "--layers 0: is out of range; give 1 to 1024"),
        (["--layers", "-3"], "--layers -3: is out of range"),
        (["--layers", "100000"], "--layers 100000: is out of range"),
        (["--layers", "many"], "--layers many: is not a whole number"),
        (["--locality", "2"], "--locality 2.0: is out of range; give 0 to 1"),
        (["--locality", "nan"], "--locality nan: is out of range"),
        (["--locality", "much"], "--locality much: is not a number"),
        (["--seed", "-1"], "--seed -1: is negative; give 0 or more"),
        (["--like", "tiny-gpt-oss", "--quant", "Q4_K"], "--quant Q4_K: has blocks of 256 weights and"),
        (["--like", "tiny-glm4moe", "--layers", "1"], "--layers 1: is too few: the first 1 of tiny-glm4moe"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_one_line_that_names_the_option_and_2(bmoe, tmp_path, arguments, expected):
    code, out, err = bmoe(tmp_path / "m.gguf", "--like", "tiny-qwen3moe", *arguments)

    assert (2, "", 1) == (code, out, err.count("\n"))
    assert err.startswith(f"bmoe: {expected}")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("out", "expected"),
    [("", "OUT: is empty;"), (".", ".: is a directory;"), ("no/m.gguf", "no/m.gguf: cannot be made: the folder no")],
)
def test_a_place_that_cannot_be_is_one_line_and_2(bmoe, tmp_path, monkeypatch, out, expected):
    monkeypatch.chdir(tmp_path)
    code, _, err = bmoe(out, *LIKE, "--overwrite")

    assert (2, 1) == (code, err.count("\n"))
    assert err.startswith(f"bmoe: {expected}")


@pytest.mark.parametrize("kind", ["fifo", "socket", "symbolic link"])
def test_what_is_no_regular_file_is_never_replaced(bmoe, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # the name of a socket has to be short
    path = tmp_path / "out"
    with socket.socket(socket.AF_UNIX) as listener:
        make = {
            "fifo": lambda: os.mkfifo(path),
            "socket": lambda: listener.bind("out"),
            "symbolic link": lambda: path.symlink_to("absent"),
        }
        make[kind]()
        before = path.lstat()
        code, _, err = bmoe("out", *LIKE, "--overwrite")

    assert (2, f"bmoe: out: is a {kind}, which is never replaced; name a regular file or a new one\n") == (code, err)
    assert (before.st_ino, before.st_mode) == (path.lstat().st_ino, path.lstat().st_mode)
    assert ["out"] == [entry.name for entry in tmp_path.iterdir()]


def test_what_came_to_the_place_meanwhile_is_not_replaced(bmoe, tmp_path, monkeypatch):
    path, header = tmp_path / "m.gguf", write_module._write_header
    monkeypatch.setattr(write_module, "_write_header", lambda *given: (os.mkfifo(path), header(*given)))
    code, _, err = bmoe(path, *LIKE)

    assert (2, True) == (code, path.is_fifo())
    assert "is a fifo" in err
    assert [path] == list(tmp_path.iterdir())


def test_a_part_of_another_run_is_kept_unless_told_otherwise(bmoe, tmp_path):
    path, part = tmp_path / "m.gguf", tmp_path / "m.gguf.part"
    part.write_text("theirs")
    code, _, err = bmoe(path, *LIKE)

    assert (2, "theirs") == (code, part.read_text())
    assert err.startswith(f"bmoe: {part}: exists already")
    assert 0 == bmoe(path, *LIKE, "--overwrite")[0]
    assert [path] == list(tmp_path.iterdir())


def test_a_part_that_is_no_regular_file_is_never_written_to(bmoe, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "m.gguf.part").symlink_to("mine")

    assert 2 == bmoe(tmp_path / "m.gguf", *LIKE, "--overwrite")[0]
    assert "mine" == (tmp_path / "mine").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_is_one_line_and_leaves_nothing(bmoe, tmp_path, monkeypatch, number, code):
    write = write_module._write_tensor
    monkeypatch.setattr(write_module, "_write_tensor", lambda *given: (signal.raise_signal(number), write(*given)))
    path = tmp_path / "m.gguf"

    assert (code, "", f"bmoe: {path}: interrupted, nothing was written\n") == bmoe(path, *LIKE)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("least", [0, 1 << 40])
def test_a_large_file_has_a_bar_on_a_terminal_and_a_small_one_nothing(tmp_path, monkeypatch, least):
    monkeypatch.setattr(command, "_SHOWN_FROM", least)
    monkeypatch.setenv("TERM", "xterm")
    with Terminal(80, 8) as terminal:
        monkeypatch.setattr("sys.stderr", terminal.stream)
        assert 0 == main(["synth", str(tmp_path / "m.gguf"), *LIKE])
        shown = terminal.close()

    assert (least == 0) is ("MiB" in shown)


def test_what_is_not_a_terminal_gets_no_bar(bmoe, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_SHOWN_FROM", 0)

    assert (0, "") == bmoe(tmp_path / "m.gguf", *LIKE)[::2]
