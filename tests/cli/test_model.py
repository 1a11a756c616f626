"""The command line with the real engine and a tiny model, in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

SUMMARY = (
    "event schema tokens tok_s prefill_s decode_s hit_rate bytes_read bytes_per_token io_wait_s peak_rss_bytes "
    "dense_bytes cache_budget_bytes direct_io seam lossy logits_sha256"
)


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory):
    from bmoe.synth import write_model

    return write_model(tmp_path_factory.mktemp("cli") / "tiny.gguf", "tiny-qwen3moe", locality=0.6)


def command(*arguments):
    return [sys.executable, "-m", "bmoe.cli", *map(str, arguments)]


def bmoe(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, timeout=120, check=False, stdin=subprocess.DEVNULL)


def test_json_has_the_resolved_profile_every_token_and_the_hash(model):
    arguments = ("--profile", "demo", "--model", model, "-p", "Once", "-n", 6, "--json", "--hash-logits")
    first, second = bmoe(*arguments), bmoe(*arguments)
    events = [json.loads(line) for line in first.stdout.splitlines()]
    summary = events[-1]

    assert (0, ["run", *["token"] * 6, "summary"]) == (first.returncode, [event["event"] for event in events])
    assert str(model) == events[0]["profile"]["model"]["path"]
    assert events[0]["resolved"]["cache"]["budget_bytes"] > 0
    assert set() == set(SUMMARY.split()) - set(summary)
    assert (6, 64, "length") == (summary["tokens"], len(summary["logits_sha256"]), summary["stop"])
    assert summary["logits_sha256"] == json.loads(second.stdout.splitlines()[-1])["logits_sha256"]


def test_text_is_that_of_the_tokens(model):
    arguments = ("--profile", "demo", "--model", model, "-p", "Once", "-n", 6)
    events = [json.loads(line) for line in bmoe(*arguments, "--json").stdout.splitlines()]
    text = "".join(event["text"] for event in events if event["event"] == "token")

    assert text + "\n" == bmoe(*arguments).stdout.decode()


def test_a_jsonl_sink_has_the_same_records(model, tmp_path):
    path = tmp_path / "run.jsonl"
    sink = f'sink=[{{plugin="jsonl",options={{path="{path}"}}}}]'
    done = bmoe("--profile", "demo", "--model", model, "-p", "Once", "-n", 3, "--json", "--set", sink)

    assert 0 == done.returncode, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        json.loads(line) for line in path.read_text("utf-8").splitlines()
    ]


def test_a_sink_that_cannot_write_is_one_line_and_2(model, tmp_path):
    sink = f'sink=[{{plugin="jsonl",options={{path="{tmp_path}/missing/run.jsonl"}}}}]'
    done = bmoe("--profile", "demo", "--model", model, "-p", "Once", "--set", sink)

    assert (2, 1, b"") == (done.returncode, done.stderr.count(b"\n"), done.stdout)
    assert f'bmoe: --set: sink.0.options.path = "{tmp_path}/missing/run.jsonl": No such' in done.stderr.decode()


def test_no_model_is_a_problem_of_the_profile_and_2():
    done = bmoe("--profile", "desktop-over-ram", "-p", "Once", "--set", "fetch.plugin=preed")

    assert (2, 2) == (done.returncode, done.stderr.count(b"\n"))
    assert b"model.path is missing; give the model with --model FILE" in done.stderr
    assert b'fetch.plugin = "preed"' in done.stderr


def test_a_model_that_is_missing_is_one_line_and_1(tmp_path):
    done = bmoe("--profile", "demo", "--model", tmp_path / "none.gguf", "-p", "Once")

    assert (1, 1) == (done.returncode, done.stderr.count(b"\n"))
    assert b"none.gguf" in done.stderr


def test_a_prompt_that_does_not_fit_is_one_line_and_2(model):
    done = bmoe("--profile", "demo", "--model", model, "-p", "Once " * 500, "--set", "model.ctx=64")

    assert (2, 1) == (done.returncode, done.stderr.count(b"\n"))
    assert b"model.ctx" in done.stderr


def test_ctrl_c_leaves_text_and_a_usable_summary(model):
    arguments = command("--profile", "demo", "--model", model, "-p", "Once", "-n", 30000, "--json")
    arguments += ["--set", "model.ctx=32768"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        lines = [process.stdout.readline() for _ in range(5)]
        process.send_signal(signal.SIGINT)
        lines += process.stdout.readlines()
        err = process.stderr.read()
    summary = json.loads(lines[-1])

    assert (130, b"") == (process.returncode, err)
    assert ("summary", "cancelled") == (summary["event"], summary["stop"])
    assert len(lines) - 2 == summary["tokens"]
    assert summary["tok_s"] > 0


def test_a_reader_that_leaves_ends_the_run_quietly(model):
    arguments = command("--profile", "demo", "--model", model, "-p", "Once", "-n", 30000, "--set", "model.ctx=32768")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()

    assert (0, b"") == (process.returncode, err)
