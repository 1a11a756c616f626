"""Nothing hangs, nothing that fails is the end, nothing is left behind; on this machine, with less than it grants."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time

import pytest

from bmoe.doctor import apart, drive, reads, software
from bmoe.doctor.apart import Answer, ask
from bmoe.doctor.findings import Check, Sources, ok
from bmoe.doctor.report import FAILED, FIRST, LATE, as_json, examine, look
from bmoe.errors import NativeError

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


class TestProbes:
    def test_one_that_hangs_is_ended_and_what_it_told_counts(self):
        began = time.monotonic()
        answer = ask("trials:probe_heat", (1, 0.5, 60), 5)

        assert time.monotonic() - began < 15
        assert ([1], "no answer within 5 s") == ([each["threads"] for each in answer.told], answer.failure)

    @LINUX
    def test_one_that_the_system_ends_is_told_by_its_signal(self, monkeypatch):
        monkeypatch.setattr(apart, "_CODE", "import os, signal; os.kill(os.getpid(), signal.SIGSYS) #{path}")

        answer = ask("software:probe_io_uring", (), 20)
        assert ("ended by SIGSYS", False) == (answer.failure, answer.raised)
        found = software.io_uring(Sources("/"))
        assert "note" == found.verdict
        assert "the sandbox ends a process that tries it (SIGSYS)" == found.measured

    def test_one_that_raises_says_what(self):
        assert Answer([], "AttributeError: module 'bmoe.doctor.software' has no attribute 'probe_'", True) == ask(
            "software:probe_", (), 20
        )

    def test_a_module_in_the_current_folder_is_not_taken(self, tmp_path, monkeypatch):
        (tmp_path / "json.py").write_text("raise SystemExit('mine')")
        monkeypatch.chdir(tmp_path)

        assert "" == ask("software:probe_structures", (), 60).failure

    def test_where_no_process_can_be_started_the_line_says_so(self, monkeypatch):
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        found = software.structures(Sources("/"))

        assert ("problem", "no process could be started: No such file or directory") == (found.verdict, found.measured)


class TestChecks:
    @pytest.mark.parametrize(("needed", "verdict"), [(False, "note"), (True, "problem")])
    def test_one_that_hangs_or_fails_is_a_line(self, needed, verdict):
        def broken(sources):
            raise OSError(errno.EIO, "Input/output error")

        late = look(Check("late", "", lambda _: time.sleep(5), (), seconds=0.1, needed=needed), Sources("/"))
        failed = look(Check("failed", "", broken, (), needed=needed), Sources("/"))
        assert (verdict, "no answer within 0.1 s", LATE) == (late.verdict, late.measured, late.remedy)
        assert (verdict, FAILED) == (failed.verdict, failed.remedy)
        assert "Input/output error" in failed.measured

    def test_without_a_place_nothing_of_the_drive_is_looked_at_and_the_others_are(self, tmp_path):
        checks = (*drive.CHECKS, Check("other", "", lambda _: ok("fine"), ()))
        made = [(check.name, found) for check, found in examine(Sources(str(tmp_path / "no")), checks) if found]

        assert ["problem", *["note"] * 4, "ok"] == [found.verdict for _, found in made]
        assert [FIRST] * 4 == [found.remedy for _, found in made[1:5]]
        assert "No such file or directory" in made[0][1].measured

    @pytest.mark.parametrize(
        ("make", "verdict", "remedy"),
        [
            (lambda path: path.write_bytes(b""), "note", drive.EMPTY),
            (lambda path: path.write_bytes(b"PK\3\4"), "note", drive.NOT_A_MODEL),
            (lambda path: path.mkdir(), "ok", ""),
            (os.mkfifo, "problem", drive.GONE),
            (lambda path: path.symlink_to(path), "problem", drive.GONE),
        ],
        ids=["empty", "zip", "folder", "fifo", "loop"],
    )
    def test_whatever_is_at_the_path_gets_a_verdict(self, tmp_path, make, verdict, remedy):
        make(tmp_path / "x")
        found = look(drive.CHECKS[0], Sources(str(tmp_path / "x")))

        assert (verdict, remedy) == (found.verdict, found.remedy)

    def test_a_path_that_cannot_be_one_is_a_problem(self):
        assert "problem" == look(drive.CHECKS[0], Sources("a\0b")).verdict


class TestReads:
    def test_a_folder_is_measured_and_left_as_it_was(self, tmp_path):
        sources = Sources(str(tmp_path), quick=True)
        direct, bandwidth = drive.direct(sources), drive.bandwidth(sources)

        assert [] == os.listdir(tmp_path)
        assert isinstance(direct.values["direct"], bool)
        grid = bandwidth.values["grid"]
        assert {"pread"} <= {cell["fetcher"] for cell in grid}
        assert all(cell["bytes_per_s"] > 0 for cell in grid)

    def test_a_file_is_only_read(self, tmp_path):
        model = tmp_path / "m.gguf"
        model.write_bytes(b"GGUF" + os.urandom(3 << 20))
        before = (model.read_bytes(), model.stat().st_mtime_ns)
        model.chmod(0o444)
        found = drive.bandwidth(Sources(str(model), quick=True))

        assert (["m.gguf"], before) == (os.listdir(tmp_path), (model.read_bytes(), model.stat().st_mtime_ns))
        assert {256 << 10} == {cell["read_bytes"] for cell in found.values["grid"]}

    def test_a_file_that_is_too_small_to_measure_says_so(self, tmp_path):
        (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(5000))
        found = drive.bandwidth(Sources(str(tmp_path / "m.gguf"), quick=True))

        assert ("note", drive.UNMEASURED) == (found.verdict, found.remedy)

    @LINUX
    def test_nothing_is_left_when_the_process_is_ended_while_it_writes(self, tmp_path):
        answer = ask("reads:probe_bandwidth", (str(tmp_path), ["pread"], False), 1.0)

        assert "no answer within 1 s" == answer.failure
        assert [] == os.listdir(tmp_path)

    @pytest.mark.parametrize("named", [False, True])
    @pytest.mark.parametrize("after", [0, 2])
    def test_a_full_disk_is_said_and_nothing_is_left(self, tmp_path, monkeypatch, after, named):
        exists, calls = os.path.exists, []

        def full(fd, data):
            calls.append(fd)
            if len(calls) > after:
                raise OSError(errno.ENOSPC, "No space left on device")
            return len(data)

        monkeypatch.setattr(os, "write", full)
        monkeypatch.setattr(os.path, "exists", lambda path: not named and exists(path))
        if after:
            with reads._data(str(tmp_path), 64 << 20) as (file, made):
                assert made
                assert named == (os.path.dirname(file) == str(tmp_path))
        else:
            with pytest.raises(NativeError, match="^full: .*No space left"), reads._data(str(tmp_path), 64 << 20):
                pass
        assert [] == os.listdir(tmp_path)

    def test_a_file_with_a_name_goes_also_if_its_process_was_ended(self, tmp_path):
        left = tmp_path / ".bmoe-doctor-1.tmp"
        left.write_bytes(b"x")
        answer = Answer([{"temporary": str(left)}], "no answer within 20 s")
        found = drive.direct(Sources(str(tmp_path), ask=lambda *_: answer))

        assert ("note", drive.UNREADABLE, []) == (found.verdict, found.remedy, os.listdir(tmp_path))

    def test_a_drive_that_stops_answering_keeps_what_was_measured(self, tmp_path):
        cell = {"fetcher": "pread", "lanes": 1, "read_bytes": 65536, "bytes_per_s": 5e8, "direct": True}

        def answers(probe, *_):
            return Answer([{"cells": 9}, cell], "no answer within 20 s") if "bandwidth" in probe else Answer([""])

        found = drive.bandwidth(Sources(str(tmp_path), ask=answers))
        assert ("note", drive.UNREADABLE) == (found.verdict, found.remedy)
        assert "pread 0.50 GB/s (1 lane, 64 KiB); then no answer within 20 s; 1 of 9" in found.measured

    @pytest.mark.parametrize(("rate", "remedy"), [(5e7, drive.SLOW), (5e8, "")])
    def test_a_slow_drive_is_noted(self, tmp_path, rate, remedy):
        cell = {"fetcher": "pread", "lanes": 1, "read_bytes": 65536, "bytes_per_s": rate, "direct": True}
        sources = Sources(str(tmp_path), ask=lambda probe, *_: Answer([cell if "bandwidth" in probe else ""]))

        assert remedy == drive.bandwidth(sources).remedy


SANDBOX = """
import ctypes, json, os, platform, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def sandbox(action):
    numbers = [425, {"x86_64": 323, "aarch64": 282}[platform.machine()]]
    rules = [(0x20, 0, 0, 0)]
    for left, number in enumerate(reversed(numbers)):
        rules.insert(1, (0x15, left + 1, 0, number))
    rules += [(6, 0, 0, 0x7FFF0000), (6, 0, 0, action)]
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    kept = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(kept))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0
def drop():
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)
"""


def inside(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """bmoe's command line in a process that has given something up first; it replaces itself, as a shell would."""
    replace = "os.execv(sys.executable, [sys.executable, '-m', 'bmoe.cli', *sys.argv[1:]])"
    code = f"{SANDBOX}\n{code}\n{replace}"
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", *arguments], capture_output=True, text=True, timeout=240, check=False
    )


@LINUX
@pytest.mark.parametrize(
    ("action", "says"), [(0x50001, "forbidden here"), (0x80000000, "SIGSYS")], ids=["errno", "kill"]
)
def test_in_a_sandbox_that_forbids_them_the_others_still_serve(tmp_path, action, says):
    done = inside(f"sandbox({action})", "--quick", "--json", str(tmp_path))
    checks = {each["check"]: each for each in json.loads(done.stdout)["checks"]}

    assert 0 == done.returncode, done.stderr
    for name in ("io_uring", "userfaultfd"):
        assert "note" == checks[name]["verdict"]
        assert says in checks[name]["measured"]
    assert "uring" in checks["fetchers"]["values"]["refused"]
    assert "pread" in {cell["fetcher"] for cell in checks["bandwidth"]["values"]["grid"]}
    assert [] == os.listdir(tmp_path)


@LINUX
def test_without_privileges_a_folder_that_is_read_only_is_no_failure(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    folder.chmod(0o555)
    done = inside("drop()", "--quick", str(folder))
    lines = done.stdout.splitlines()

    assert (0, "") == (done.returncode, done.stderr)
    for name in ("direct I/O", "bandwidth"):
        at = next(index for index, line in enumerate(lines) if line.startswith(f"note     {name}"))
        assert "Permission denied" in lines[at]
        assert lines[at + 1].endswith(drive.NOT_WRITABLE)
    assert lines[-1].endswith("0 in the way: bmoe can run here")


def test_the_json_is_plain(tmp_path):
    checks = (drive.CHECKS[0],)
    made = [(check, found) for check, found in examine(Sources(str(tmp_path)), checks) if found]
    record = json.loads(json.dumps(as_json(Sources(str(tmp_path)), made)))

    assert {"schema", "path", "quick", "usable", "checks"} == set(record)
    assert [{"check": "place", "verdict": "ok", "measured": f"{tmp_path}, a folder", "remedy": None, "values": {}}] == (
        record["checks"]
    )
