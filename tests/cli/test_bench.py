"""``bmoe bench`` on the model that comes with bmoe: verdicts, files, and every way that a side or the bench can end."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

SHORT = ("--set", "model.threads=1", "--cooldown", "0", "-n", "4", "--warmup", "4")


COMMAND = "bench"


@pytest.mark.slow
class TestVerdicts:
    """One bench in twenty of equal sides may end in a verdict; two in a row that agree, one in eight hundred."""

    @staticmethod
    def bench(bmoe, *arguments):
        code, out, err = bmoe(*arguments, "--json", "--rounds", "6", "-n", "16", "--warmup", "8", *SHORT[:4])
        assert (0, "") == (code, "".join(line for line in err.splitlines() if "busy" not in line))
        found = json.loads(out)
        return found, found["sides"][1]["against_baseline"]

    def test_equal_sides_have_none(self, bmoe):
        found, first = self.bench(bmoe, "--profile", "demo", "--profile", "demo")
        if first["verdict"] is not None:
            assert first["verdict"] != self.bench(bmoe, "--profile", "demo", "--profile", "demo")[1]["verdict"]

        assert 6 == first["pairs"]
        assert 12 == len(found["trials"])
        for prompt in range(4):
            same = [trial for trial in found["trials"] if trial["prompt"] == prompt]
            assert 1 == len({(trial["logits_sha256"], tuple(trial["tokens"])) for trial in same})

    def test_a_cache_of_half_the_experts_is_faster_than_a_tiny_one(self, bmoe):
        found, against = self.bench(bmoe, "--profile", "demo", "--vary", "cache.budget_mb=3,9.5")
        if against["verdict"] is None:  # the machine was busy with something else
            against = self.bench(bmoe, "--profile", "demo", "--vary", "cache.budget_mb=3,9.5")[1]

        assert "faster" == against["verdict"]
        assert against["low"] > 1
        tiny, half = (side["figures"] for side in found["sides"])
        assert half["hit_rate"] > tiny["hit_rate"]
        assert half["bytes_per_token"] < tiny["bytes_per_token"]


class TestOutput:
    def test_files_and_a_markdown_row_for_each_side(self, bmoe, tmp_path):
        pytest.importorskip("matplotlib", reason="needs bmoe[plots]")
        files = {name: tmp_path / name for name in ("kept.json", "plot.png", "report.json")}
        options = [
            each for o, f in zip(("--out", "--plot", "--report"), files.values(), strict=True) for each in (o, f)
        ]
        vary = ("--vary", "cache.budget_mb=3,9.5")
        code, out, err = bmoe("--profile", "demo", *vary, *SHORT, "--rounds", "1", "--markdown", *options)

        assert 0 == code
        lines = out.splitlines()
        assert 4 == len(lines)
        assert {10} == {line.count("|") for line in lines}
        assert lines[2].startswith("| `cache.budget_mb=3` | ")
        assert "bmoe: notice: --rounds 1 cannot show a difference; a verdict needs 6 rounds" in err.splitlines()
        assert files["plot.png"].read_bytes().startswith(b"\x89PNG")
        assert ("bench", True) == tuple(
            json.loads(files["kept.json"].read_text())[key] for key in ("event", "complete")
        )
        assert sorted(files) == sorted(path.name for path in tmp_path.iterdir())

        report = files["report.json"].read_text()
        assert "bench_report" == json.loads(report)["event"]
        private = [str(Path.home()), str(Path.cwd()), str(tmp_path), os.sep + "models" + os.sep, platform.node()]
        private += [getpass.getuser()] if len(getpass.getuser()) > 4 else []
        assert [text for text in private if len(text) > 3 and text in report] == []

    def test_one_side_has_just_its_figures(self, bmoe):
        code, out, err = bmoe("--profile", "demo", *SHORT, "--rounds", "1")
        lines = out.splitlines()

        assert 0 == code
        assert lines[0].split()[:2] == ["side", "tok/s"]
        assert lines[1].startswith("demo ")
        assert "verdict" not in out
        assert [] == [line for line in err.splitlines() if "rounds" in line]

    def test_sides_of_other_models_say_so(self, bmoe):
        _, _, err = bmoe("--profile", "demo", "--vary", "model.path=bmoe-ref,bmoe-ref-q4", *SHORT, "--rounds", "1")

        assert "bmoe: notice: model.path=bmoe-ref-q4: runs another model than model.path=bmoe-ref" in err.splitlines()

    def test_without_streaming_what_is_read_is_unmeasured(self, bmoe):
        off = ("--set", "stream.enabled=false")
        code, out, _ = bmoe("--profile", "resident", "--model", "bmoe-ref", *off, *SHORT, "--rounds", "1", "--json")
        figures = json.loads(out)["sides"][0]["figures"]

        assert (0, None, None, None) == (
            code, figures["hit_rate"], figures["bytes_per_token"], figures["read_wait_share"],
        )  # fmt: skip


class TestFaults:
    def test_a_side_whose_model_is_missing_costs_the_other_nothing(self, bmoe, tmp_path):
        profile = tmp_path / "gone.toml"
        profile.write_text('[model]\npath = "gone.gguf"\n')
        code, out, err = bmoe("--profile", "demo", "--profile", profile, *SHORT, "--rounds", "2", "--json")
        found = json.loads(out)

        assert 1 == code
        assert [2, 0] == [sum(trial["side"] == side for trial in found["trials"]) for side in (0, 1)]
        assert f"bmoe: side {profile}: {tmp_path / 'gone.gguf'}: no such file" in err
        assert ["ModelError", 0] == [found["sides"][1]["failure"][key] for key in ("kind", "round")]
        assert err.count("no such file") == 1

    def test_a_context_that_is_too_small_names_the_remedy(self, bmoe):
        code, out, err = bmoe("--profile", "demo", *SHORT, "--set", "model.ctx=32", "--rounds", "1")

        assert (1, "") == (code, out)
        assert "warm-up and 4 tokens need a context of" in err
        assert "raise model.ctx (now 32), or ask for fewer with -n" in err
        assert "bmoe: nothing was measured" in err.splitlines()

    def test_a_plot_that_cannot_be_written_costs_no_figure(self, bmoe, tmp_path, monkeypatch):
        monkeypatch.setattr("bmoe.cli.files.os.replace", fail)
        kept = tmp_path / "kept.json"
        kept.write_text("before")
        code, out, err = bmoe("--profile", "demo", *SHORT, "--rounds", "1", "--json", "--out", kept)

        assert (1, 1) == (code, len(json.loads(out)["trials"]))
        assert f"bmoe: --out {kept}: No space left on device" in err.splitlines()
        assert (["kept.json"], "before") == ([path.name for path in tmp_path.iterdir()], kept.read_text())

    @pytest.mark.parametrize(
        ("number", "timeout", "expected"),
        [
            (signal.SIGKILL, "60", "was killed (SIGKILL), as is done when memory is short; lower cache.budget_mb"),
            (signal.SIGSTOP, "3", "said nothing for 3 s and was ended; raise --timeout"),
            (signal.SIGABRT, "60", "was ended by SIGABRT"),
        ],
    )
    def test_a_worker_that_dies_or_hangs_is_one_line(self, number, timeout, expected):
        with started("--profile", "demo", *SHORT[:4], "-n", "380", "--rounds", "9", "--timeout", timeout) as process:
            os.kill(worker_of(process.pid), number)
            out, err = process.communicate(timeout=120)

        assert 1 == process.returncode
        (line,) = [line for line in err.splitlines() if "side demo" in line]
        assert expected in line
        assert [] == children(process.pid)
        assert "" == out or "failed in round" in err

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(self, number, tmp_path):
        kept = tmp_path / "kept.json"
        options = ("-n", "16", "--rounds", "500", "--json", "--out", str(kept))
        with started("--profile", "demo", *SHORT[:4], *options) as process:
            wait_for(kept.exists)
            worker = worker_of(process.pid)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)

        found = json.loads(out)
        assert 128 + number == process.returncode
        assert not found["complete"]
        assert 0 < len(found["trials"]) < 500
        assert found == json.loads(kept.read_text())
        assert {} == {side["label"]: side["failure"] for side in found["sides"] if side["failure"]}
        assert not Path(f"/proc/{worker}").exists()
        assert "Traceback" not in err

    def test_a_bench_that_is_killed_leaves_the_file_and_no_process(self, tmp_path):
        kept = tmp_path / "kept.json"
        with started("--profile", "demo", *SHORT[:4], "-n", "16", "--rounds", "500", "--out", str(kept)) as process:
            wait_for(kept.exists)
            worker = worker_of(process.pid)
            process.kill()
            process.communicate(timeout=60)

        assert not json.loads(kept.read_text())["complete"]
        wait_for(lambda: not Path(f"/proc/{worker}").exists() or " Z " in Path(f"/proc/{worker}/stat").read_text())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "no profile: name one with --profile"),
        (("--profile", "demo", "--rounds", "0"), "--rounds 0: is too small; give 1 or more"),
        (("--profile", "demo", "--pairs", "x"), "--rounds x: is not a whole number"),
        (("--profile", "demo", "--warmup", "-1"), "--warmup -1: is too small; give 0 or more"),
        (("--profile", "demo", "-n", "0"), "-n 0: at least 1 token has to be measured"),
        (("--profile", "demo", "--cooldown", "nan"), "--cooldown nan: give 0 to 86400 seconds"),
        (("--profile", "demo", "--timeout", "0"), "--timeout 0: give more than 0 and at most 86400 seconds"),
        (("--profile", "demo", "--json", "--markdown"), "--json and --markdown both want standard output"),
        (("--profile", "demo", "--plot", "plot.bmp"), '"bmp" is not a kind of image that --plot plot.bmp can be'),
        (("--profile", "demo", "--out", "/gone/x"), "--out /gone/x: there is no folder /gone"),
        (("--profile", "demo", "--report", "/dev/null"), "--report /dev/null: is no regular file and is not replaced"),
        (("--profile", "demo", "--out", "x", "--report", "./x"), "--out x: is written by another option too"),
        (("--profile", "demo", "--vary", "cache"), "--vary cache: is not KEY=VALUE,VALUE"),
        (("--profile", "demo", "--vary", "cache.budgt_mb=1,2"), "side cache.budgt_mb=1: --set: cache.budgt_mb = 1"),
        (
            ("--profile", "demo", "--set", "cache.policy=lru", "--vary", "cache.budget_mb=1,9"),
            "side cache.budget_mb=1: --set: cache.budget_mb = 1",
        ),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_measured(bmoe, arguments, expected):
    code, out, err = bmoe(*arguments)

    assert (2, "") == (code, out)
    assert f"bmoe: {expected}" in err


def fail(*_):
    raise OSError(28, os.strerror(28))


@contextlib.contextmanager
def started(*arguments):
    command = [sys.executable, "-m", "bmoe.cli", "bench", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def children(pid):
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def worker_of(pid):
    """The worker of a bench, once it has the model open: before that it may have nothing to stop."""
    found = []

    def opened():
        found[:] = [child for child in children(pid) if "bmoe-ref" in maps(child)]
        return bool(found)

    wait_for(opened)
    return found[0]


def maps(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text()
    return ""


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
