"""A trace that cannot be written costs neither the text nor what was in its place before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

from bmoe.cli import main
from bmoe.errors import ProfileError
from bmoe.native.memory import PAGE
from bmoe.replay.route_trace import read_trace
from bmoe.trace import output
from bmoe.trace.reading import load

KINDS = ("route", "io", "compute")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("missing/t.csv", "cannot be written (No such file or directory); choose another place"),
        (".", "is no file; choose another place"),
        ("book.txt", "exists and is no trace, so it is not replaced; choose another place"),
        ("book.txt/t.csv", "cannot be written (Not a directory); choose another place"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_before_anything_is_read(run, tmp_path, kind, place, said):
    (tmp_path / "book.txt").write_text("mine")
    with pytest.raises(ProfileError) as caught:
        run(f'trace.{kind}="{tmp_path}/{place}"')

    assert str(caught.value).endswith(said)
    assert f": trace.{kind} = " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "book.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


def test_a_model_is_not_written_over(run, models, tmp_path):
    with pytest.raises(ProfileError, match=r"trace\.route = .* is the file of the model too; choose another place"):
        run(f'trace.route="{models.path()}"')
    with pytest.raises(ProfileError, match=r"trace\.io = .* is the file of trace\.route too; choose another place"):
        run(f'trace.route="{tmp_path}/t"', f'trace.io="{tmp_path}/x/../t"')


def test_a_model_that_is_not_streamed_has_no_trace(run, tmp_path):
    with pytest.raises(ProfileError, match=r"trace\.route needs a streamed model; set stream\.enabled = true"):
        run("stream.enabled=false", f'trace.route="{tmp_path}/t"')


def test_parquet_without_pyarrow_is_one_line(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ProfileError, match=r"needs pyarrow for Parquet; install it \(pip install 'bmoe\[parquet\]'\)"):
        run(f'trace.route="{tmp_path}/t.parquet"')

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_ends_the_trace_and_not_the_run(run, kind, capsys):
    plain, ids, _ = run()
    summary, traced_ids, engine = run(f"trace.{kind}=/dev/full")

    assert (summary.logits_sha256, traced_ids) == (plain.logits_sha256, ids)
    assert engine.tracing.failures() == [
        "/dev/full: the trace ends (No space left on device); make room there or choose another place"
    ]
    assert 1 == sum(captured.count("trace failed") for captured in capsys.readouterr())


def test_a_disk_that_fills_up_leaves_whole_lines_and_the_old_trace(run, tmp_path, monkeypatch):
    path = tmp_path / "route.csv"
    run(f'trace.route="{path}"', tokens=3)
    before = path.read_bytes()
    opened = output.TracePlace._open

    class Small:
        """A file with room for 3000 bytes; a write may be cut short, as the system's may."""

        def __init__(self, file):
            self.file, self.left = file, 3000

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            if not self.left:
                raise OSError(28, os.strerror(28))
            done = self.file.write(data[: self.left])
            self.left -= done
            return done

    monkeypatch.setattr(output.TracePlace, "_open", lambda place: Small(opened(place)))
    _, _, engine = run(f'trace.route="{path}"', tokens=60)

    (failure,) = engine.tracing.failures()
    assert failure.endswith(
        f"No space left on device); make room there or choose another place; what was written is in {path}.part"
    )
    assert path.read_bytes() == before
    rows = read_trace(f"{path}.part").rows
    assert 0 < len(rows) == engine.tracing.written["route"].rows
    assert len({row.step for row in rows}) > 8


def test_a_parquet_that_cannot_be_ended_is_no_file(run, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    path = tmp_path / "route.parquet"
    monkeypatch.setattr(output.TracePlace, "keep", lambda place: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    summary, _, engine = run(f'trace.route="{path}"')

    assert summary.stop == "length"
    assert len(engine.tracing.failures()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_generates_nothing_leaves_an_old_trace(run, tmp_path):
    path = tmp_path / "route.csv"
    run(f'trace.route="{path}"', tokens=3)
    before = path.read_bytes()
    with pytest.raises(Exception, match="prompt"):
        run(f'trace.route="{path}"', "model.ctx=4", "model.ubatch=4")

    assert path.read_bytes() == before
    assert [path] == list(tmp_path.iterdir())


def test_two_runs_do_not_write_one_file(run, tmp_path):
    path = tmp_path / "route.csv"
    held = output.TracePlace(str(path))
    with pytest.raises(ProfileError, match="is being written by another run; choose another place"):
        run(f'trace.route="{path}"')
    held.drop()
    run(f'trace.route="{path}"')
    assert read_trace(path).rows


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_a_trace_that_loads(models, tmp_path, how):
    path, text = tmp_path / "route.csv", tmp_path / "text"
    profile = tmp_path / "long.toml"
    profile.write_text(f'[model]\npath = "{models.path()}"\nthreads = 1\nctx = 8192\n[cache]\nbudget_mb = 1\n')
    command = [
        sys.executable,
        "-m",
        "bmoe.cli",
        "trace",
        "route",
        "--profile",
        str(profile),
        "-p",
        "Once",
        "-n",
        "8000",
    ]
    with text.open("wb") as out:
        process = subprocess.Popen(
            [*command, "-o", str(path)], stdout=out, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        part = Path(f"{path}.part")
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size > 10 * PAGE) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(how)
        _, errors = process.communicate(timeout=60)

    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), errors
    left = path if how == signal.SIGINT else part
    loaded = load(str(left))
    assert len(loaded.columns["step"]) > 1000
    assert text.stat().st_size > 0


def test_the_command_writes_a_trace_and_the_text(models, tmp_path, capsys):
    short = ["--profile", "demo", "--set", "model.threads=1", "-p", "Once", "-n", "4"]
    code = main(["trace", "io", *short, "-o", str(tmp_path / "a b.csv")])
    captured = capsys.readouterr()

    assert code == 0
    assert captured.out.strip()
    rows = len(load(str(tmp_path / "a b.csv")).columns["bytes"])
    assert captured.err.splitlines()[-1] == f"bmoe: {tmp_path}/a b.csv: {rows} rows"


def test_the_command_says_that_the_disk_is_full(capsys):
    code = main(
        ["trace", "route", "--profile", "demo", "--set", "model.threads=1", "-p", "Once", "-n", "4", "-o", "/dev/full"]
    )
    captured = capsys.readouterr()

    assert code == 1
    assert captured.out.strip()
    assert 1 == captured.err.count("No space left on device")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "trace needs one of route, io, compute, view; example: "),
        (["rout"], '"rout" is not a command of trace; did you mean route?'),
        (["route", "-p", "x"], "--profile is missing; example: "),
        (["io", "--profile", "demo"], "-p is missing; example: "),
        (["route", "--profile", "demo", "-p", "x", "-n", "0"], "-n 0: at least 1 token has to be asked for"),
        (["route", "--profile", "demo", "-p", "x", "-o", ""], "-o '': is no name of a file"),
        (["route", "--profile", "demo", "-p", "x", "--nodes"], "unknown option --nodes"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys, arguments, said):
    assert main(["trace", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bmoe: {said}")
