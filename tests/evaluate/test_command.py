"""``bmoe eval``: what it prints where, its exit codes, and one line for everything that is wrong."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bmoe.cli import main
from bmoe.cli.eval import _figure, _remarks
from bmoe.evaluate.metrics import METRICS
from bmoe.evaluate.prompts import FORMS
from bmoe.evaluate.replies import Replies
from bmoe.testing.terminal import Screen, Terminal

TEXTS = [{"text": "a river"}, {"text": "the old house"}, {"text": "home"}]
CHOICE = {"question": "q", "choices": ["ab", "c d"], "answer": "B"}
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "eval.md"


@pytest.fixture(name="base")
def _base(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("model.threads=1", "model.ctx=64", "cache.budget_mb=2")
    return ["--profile", "demo", "--model", model, *(f"--set={each}" for each in small)]


@pytest.fixture(name="bmoe")
def _bmoe(capsys):
    def call(*arguments):
        code = main(["eval", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_figures_are_on_stdout_and_remarks_on_stderr(bmoe, base, write, tmp_path):
    code, out, err = bmoe(write(*TEXTS), *base)
    lines = out.splitlines()

    assert 0 == code
    assert lines[0].endswith("data.jsonl (text): 3 of 3 items")
    assert ["metric", "value", "95", "%", "interval", "over"] == lines[1].split()
    assert re.fullmatch(r"perplexity +[\d.]+ +[\d.]+ to [\d.]+ +21 tokens of 3 items", lines[2])
    assert re.fullmatch(r"nll +[\d.]+ +[\d.]+ to [\d.]+ +21 tokens of 3 items", lines[3])
    assert re.search(r"^hit rate [\d.]+ % · [\d.]+ MiB/token$", err, re.MULTILINE)
    assert "replies in data.replies.jsonl\n" in err
    assert (tmp_path / "data.replies.jsonl").exists()


def test_json_is_one_object_with_the_run(bmoe, base, write):
    code, out, _ = bmoe(write(CHOICE, CHOICE), *base, "--json", "--out", "mine.jsonl", "--metric", "accuracy_norm")
    summary = json.loads(out)

    assert (0, ["accuracy_norm"], "mine.jsonl") == (code, list(summary["metrics"]), summary["replies"])
    assert ("run", False) == (summary["run"]["event"], summary["lossy"])
    assert {"value", "low", "high", "n", "items"} == set(summary["metrics"]["accuracy_norm"])


def test_the_same_seed_gives_the_same_interval(bmoe, base, write):
    data = write(*({"text": "word " * n} for n in range(1, 10)))
    found = [
        json.loads(bmoe(data, *base, "--json", "--resume", "--seed", seed)[1])["metrics"]["nll"]
        for seed in ("1", "1", "2")
    ]

    assert found[0] == found[1] != found[2]
    assert found[0]["value"] == found[2]["value"]


def test_skipped_items_are_named(bmoe, base, write):
    code, out, err = bmoe(write(CHOICE, {**CHOICE, "question": "long " * 40, "id": "far"}), *base)

    assert 0 == code
    assert "1 of 2 items\n" in out
    assert re.search(r"^bmoe: skipped line 2 \(id far\): it needs \d+ tokens and the context has 64", err, re.MULTILINE)


def test_questions_can_be_asked_in_the_models_own_template(bmoe, base, write):
    data, lengths = write(CHOICE), {}
    for form in FORMS:
        assert 0 == bmoe(data, *base, "--prompts", form, "--out", form)[0]
        lengths[form] = json.loads(Path(form).read_text().splitlines()[1])["prompt_tokens"]

    assert lengths["chat"] > lengths["raw"] == 1 < lengths["plain"]


def test_ctrl_c_keeps_what_is_done_and_the_rest_can_follow(bmoe, base, write, monkeypatch):
    add = Replies.add

    def interrupted(self, line, reply):
        add(self, line, reply)
        if line == 2:
            signal.raise_signal(signal.SIGINT)

    data = write(*TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(Replies, "add", interrupted)
        code, out, err = bmoe(data, *base)

    assert 130 == code
    assert "2 of 3 items\n" in out
    assert "interrupted with 1 of 3 items left; --resume goes on\n" in err

    code, out, err = bmoe(data, *base, "--resume")

    assert 0 == code
    assert "3 of 3 items\n" in out
    assert "done in 2 sessions" in err


def test_on_a_terminal_there_is_a_bar_that_leaves_nothing(base, write):
    command = [sys.executable, "-m", "bmoe.cli", "eval", write(*TEXTS), *base]
    with Terminal(100, 12) as terminal:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal.fd, timeout=120, check=True)
        shown = terminal.close()

    assert "3/3" in shown
    assert [line for line in Screen(100, 12).feed(shown).lines if "/3" in line] == []
    assert b"3 of 3 items" in done.stdout


def test_elsewhere_nothing_is_drawn(bmoe, base, write):
    _, _, err = bmoe(write(*TEXTS), *base)

    assert "\x1b" not in err
    assert "/3" not in err


def test_remarks_mark_what_limits_a_conclusion(bmoe, base, write):
    summary = json.loads(bmoe(write({"text": "x" * 70}), *base, "--json")[1])

    assert ["notice: 1 longer than the context, scored in windows of it"] == [
        line for line, style in _remarks(summary) if style
    ]
    assert ("lossy: the output may differ from that of the resident model", "bold magenta") in list(
        _remarks({**summary, "lossy": True})
    )
    assert "experts not streamed" == next(_remarks({**summary, "bytes_per_token": None}))[0]


class TestWrong:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "no profile: name one with --profile; example: bmoe eval "),
            (["--profile", "demo", "--format", "chioce"], '"chioce" is not a format; did you mean choice?'),
            (["--profile", "demo", "--metric", "perplexty"], '"perplexty" is not a metric; did you mean perplexity?'),
            (
                ["--profile", "demo", "--metric", "accuracy"],
                "--metric accuracy: is no metric of text data (perplexity,",
            ),
            (
                ["--profile", "demo", "--metric", "kl"],
                "--metric kl: needs a run to compare with; add --against resident",
            ),
            (["--profile", "demo", "--against", "residnt"], '"residnt" is not a run to compare with; did you mean res'),
            (["--profile", "demo", "--prompts", "chta"], '"chta" is not a form of prompts; did you mean chat?'),
            (["--profile", "demo", "--limit", "0"], "--limit 0: no item would be left; give at least 1"),
            (["--profile", "demo", "-n", "0"], "-n 0: at least 1 token has to be asked for"),
            (["--profile", "demo", "--seed", "-1"], "--seed -1: is negative"),
            (["--profile", "demo", "--resume", "--overwrite"], "--resume keeps the earlier replies and --overwrite"),
            (
                ["--profile", "demo", "--format", "choice"],
                '{data}: line 1: has no "question" but the keys text; choice ',
            ),
            (["--profile", "dmeo"], '"dmeo" is neither a file nor a bundled profile; did you mean "demo"?'),
            (["--profile", "resident"], "resident.toml: model.path is missing; give the model with --model FILE"),
            (["--proflie", "demo"], "unknown option --proflie; did you mean --profile?"),
        ],
        ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
    )
    def test_it_is_one_line_and_2(self, bmoe, write, arguments, said):
        data = write(*TEXTS)
        code, out, err = bmoe(data, *arguments)

        assert (2, "") == (code, out)
        assert err.startswith(f"bmoe: {said.replace('{data}', data)}"), err
        assert 1 == err.count("\n")

    def test_a_file_that_is_not_there(self, bmoe):
        assert (2, "", "bmoe: none.jsonl: no such file; check the path\n") == bmoe("none.jsonl", "--profile", "demo")

    def test_no_item_that_could_be_scored_is_1(self, bmoe, base, write):
        code, out, err = bmoe(write({"text": "x"}), *base)

        assert (1, "") == (code, out)
        assert "none of 1 items could be scored; the first (line 1): it has no token after the first" in err

    def test_an_earlier_file_is_2(self, bmoe, base, write):
        data = write(CHOICE)
        bmoe(data, *base)
        code, _, err = bmoe(data, *base)

        assert (2, 1) == (code, err.count("\n"))
        assert err.startswith("bmoe: data.replies.jsonl: exists; --resume")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "?"),
        (0.0, "0.0000"),
        (1.0, "1.000"),
        (0.425, "0.4250"),
        (18.4444, "18.444"),
        (9302.26, "9302.3"),
        (2.5e-6, "2.50e-06"),
        (-0.25, "-0.2500"),
    ],
)
def test_figures_are_short(value, shown):
    assert shown == _figure(value)


def test_every_metric_and_form_is_in_the_reference():
    page = PAGE.read_text("utf-8")

    assert [name for name in (*METRICS, *FORMS) if f"`{name}`" not in page] == []
