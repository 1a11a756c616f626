"""Whole evaluations: the summary, the file of replies, going on after an interruption, and the resident run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from bmoe import BmoeError, NativeError, ReadError
from bmoe.evaluate.metrics import metrics_of
from bmoe.evaluate.reference import Reference, resident
from bmoe.evaluate.replies import RepliesError, fingerprint
from bmoe.evaluate.run import Evaluation, Settings
from bmoe.resolve import resolve

from .conftest import PROFILE

TEXTS = [{"text": text} for text in ("a river", "the old house", "x" * 70, "they came home")]
CHOICES = [{"question": f"q{n}", "choices": ["ab", "c d"], "answer": n % 2, "id": f"c{n}"} for n in range(3)]
PROBLEMS = [{"question": "How many?", "answer": "#### 4"}, {"question": "q", "answer": 7}]
CUT = frozenset({"decode_s", "sessions", "hit_rate", "bytes_per_token", "prefill_bytes", "run", "replies"})


def lines(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def run(evaluation: Evaluation, stop_after: int | None = None):
    with evaluation:
        count = 0

        def item():
            nonlocal count
            count += 1
            if count == stop_after:
                evaluation.cancel()

        evaluation.run(item=item)
        return evaluation.summary(metrics_of(evaluation._dataset.format, paired=False))


class TestSummary:
    def test_has_metrics_costs_and_marks(self, prepare, write):
        summary = run(prepare(write(*TEXTS)))

        assert ("eval", 1, "text", 4, 4, True) == tuple(
            summary[key] for key in ("event", "schema", "format", "items", "scored", "complete")
        )
        assert {"value", "low", "high", "n", "items"} == set(summary["metrics"]["perplexity"])
        assert summary["metrics"]["perplexity"]["low"] < summary["metrics"]["perplexity"]["value"]
        assert summary["metrics"]["perplexity"]["n"] == summary["decoded_tokens"]
        assert 1 == summary["windowed"]
        assert 0 < summary["hit_rate"] < 1
        assert summary["bytes_per_token"] > 0
        assert summary["lossy"] is False
        assert "run" == summary["run"]["event"]
        assert json.loads(json.dumps(summary, allow_nan=False)) == summary

    def test_without_streaming_nothing_is_said_of_reads(self, prepare, write):
        summary = run(prepare(write(*TEXTS[:2]), overrides=["stream.enabled=false"]))

        assert (None, None, None) == (summary["hit_rate"], summary["bytes_per_token"], summary["prefill_bytes"])

    def test_streamed_and_resident_scores_are_the_same(self, prepare, write):
        data = write(*TEXTS)
        streamed = run(prepare(data))
        plain = run(prepare(data, overrides=["stream.enabled=false"], out="plain.jsonl"))

        assert streamed["metrics"] == plain["metrics"]

    def test_a_limit_takes_the_first(self, prepare, write, tmp_path):
        assert 2 == run(prepare(write(*TEXTS), limit=2))["items"]
        assert ["1", "2"] == [line["id"] for line in lines(tmp_path / "replies.jsonl")[1:]]

    def test_an_item_that_does_not_fit_is_named_and_counted(self, prepare, write, tmp_path):
        summary = run(prepare(write(CHOICES[0], {**CHOICES[1], "question": "long " * 40})))

        assert (2, 1, True) == (summary["items"], summary["scored"], summary["complete"])
        assert [(2, "c1")] == [(each["line"], each["id"]) for each in summary["skipped"]]
        assert summary["skipped"][0]["reason"].endswith("tokens and the context has 64; raise model.ctx")
        assert summary["skipped"][0]["reason"] == lines(tmp_path / "replies.jsonl")[2]["skipped"]

    def test_nothing_but_such_items_is_an_error(self, prepare, write):
        with pytest.raises(BmoeError, match=r"none of 2 items could be scored; the first \(line 1\): it has no token"):
            run(prepare(write({"text": "x"}, {"text": "y"})))


class TestReplies:
    def test_every_reply_is_kept_with_its_text_ids_and_figures(self, prepare, write, tmp_path):
        run(prepare(write(*PROBLEMS)))
        session, *items = lines(tmp_path / "replies.jsonl")

        assert ("session", 1, "run") == (session["event"], session["schema"], session["run"]["event"])
        assert [("item", 1, "1"), ("item", 2, "2")] == [(i["event"], i["line"], i["id"]) for i in items]
        assert 6 == len(items[0]["ids"])
        assert ("4", "length", {"right": 0}) == (items[0]["answer"], items[0]["stop"], items[0]["score"])
        assert items[0]["text"]
        assert items[0]["decode"]["decodes"] == 5
        assert items[0]["prefill"]["decodes"] == 2

    def test_a_reply_is_there_as_soon_as_it_is_finished(self, prepare, write, tmp_path):
        counts = []
        with prepare(write(*CHOICES)) as evaluation:
            evaluation.run(item=lambda: counts.append(len(lines(tmp_path / "replies.jsonl"))))

        assert [2, 3, 4] == counts

    def test_an_earlier_file_is_never_lost_by_accident(self, prepare, write):
        data = write(*CHOICES)
        run(prepare(data))
        with pytest.raises(RepliesError, match=r"exists; --resume goes on with it, --overwrite replaces it, --out"):
            prepare(data)

        assert 1 == run(prepare(data, overwrite=True))["sessions"]

    def test_two_runs_never_write_the_same_file(self, prepare, write):
        data = write(*CHOICES)
        with prepare(data), pytest.raises(RepliesError, match="another run is writing it"):
            run(prepare(data, resume=True))

    @pytest.mark.parametrize("out", [".", "none/replies.jsonl"])
    def test_where_nothing_can_be_written_is_said_before_the_model_is_opened(self, prepare, write, out):
        with pytest.raises(RepliesError, match="cannot be written; name another file with --out"):
            prepare(write(*CHOICES), out=out)


class TestResume:
    def test_no_item_is_repeated_and_the_figures_are_those_of_one_run(self, prepare, write, tmp_path):
        data = write(*TEXTS)
        whole = run(prepare(data, out="whole.jsonl"))
        first = run(prepare(data), stop_after=2)
        second = run(prepare(data, resume=True))

        assert (2, False) == (first["scored"], first["complete"])
        assert (True, 2) == (second["complete"], second["sessions"])
        assert {k: v for k, v in whole.items() if k not in CUT} == {k: v for k, v in second.items() if k not in CUT}
        events = lines(tmp_path / "replies.jsonl")
        assert ["session", 1, 2, "session", 3, 4] == [each.get("line", each["event"]) for each in events]

    def test_what_is_complete_opens_no_model(self, prepare, write, monkeypatch):
        data = write(*CHOICES)
        first = run(prepare(data))
        monkeypatch.setattr("bmoe.evaluate.run.Engine", None)
        again = run(prepare(data, resume=True))

        assert first == again

    def test_a_reply_that_was_cut_off_is_made_again(self, prepare, write, tmp_path):
        data, out = write(*CHOICES), tmp_path / "replies.jsonl"
        whole = run(prepare(data))
        out.write_bytes(out.read_bytes()[:-20])
        again = run(prepare(data, resume=True))

        assert whole["metrics"] == again["metrics"]
        assert ["session", 1, 2, "session", 3] == [each.get("line", each["event"]) for each in lines(out)]

    def test_more_items_of_the_same_file_may_follow(self, prepare, write):
        data = write(*CHOICES)
        run(prepare(data, limit=1))

        assert 3 == run(prepare(data, resume=True))["scored"]

    def test_without_an_earlier_file_it_starts(self, prepare, write):
        assert 1 == run(prepare(write(*CHOICES), resume=True))["sessions"]

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"overrides": ["cache.budget_mb=1"]}, r"another cache.budget_mb \(2, now 1\); --overwrite"),
            ({"settings": Settings(tokens=7)}, r"another tokens \(6, now 7\); --overwrite"),
            ({"settings": Settings("raw", 6, "resident")}, r'prompts \("plain", now "raw"\), against \(null, now "res'),
        ],
        ids=["profile", "setting", "two"],
    )
    def test_another_run_is_refused(self, prepare, write, change, said):
        data = write(*CHOICES)
        run(prepare(data), stop_after=1)
        with pytest.raises(RepliesError, match=said) as caught:
            prepare(data, resume=True, **change)

        assert "\n" not in str(caught.value)

    def test_other_data_are_refused(self, prepare, write):
        run(prepare(write(*CHOICES)), stop_after=1)
        with pytest.raises(RepliesError, match="was made with another dataset; --overwrite"):
            prepare(write(*CHOICES[:2]), resume=True)

    def test_another_model_is_refused_and_a_copy_is_not(self, prepare, write, models, model, tmp_path):
        data = write(*CHOICES)
        run(prepare(data), stop_after=1)
        with pytest.raises(RepliesError, match="was made with another model; --overwrite"):
            prepare(data, resume=True, path=str(models.path(locality=0.6, seed=1)))
        copy = shutil.copy(model, tmp_path / "copy.gguf")

        assert run(prepare(data, resume=True, path=str(copy)))["complete"]

    @pytest.mark.parametrize(
        "content", ["no JSON\n", "{}\n", '{"event": "item", "line": 1}\n', '{"event": "run"}\n', "[]\n", "3\n"]
    )
    def test_a_file_that_holds_no_replies_is_refused(self, prepare, write, tmp_path, content):
        (tmp_path / "replies.jsonl").write_text(content)
        with pytest.raises(RepliesError, match="line 1 is no reply of bmoe eval"):
            prepare(write(*CHOICES), resume=True)


class TestEnds:
    def test_cancelled_inside_an_item_that_item_is_given_up(self, prepare, write):
        data, count = write(*TEXTS), 0
        with prepare(data) as evaluation:

            def token():
                nonlocal count
                count += 1
                if count == 10:  # the first has 6 decodes
                    evaluation.cancel()

            assert not evaluation.run(token)
            summary = evaluation.summary(["nll"])

        assert (10, 1, False) == (count, summary["scored"], summary["complete"])
        assert 4 == run(prepare(data, resume=True))["scored"]

    def test_cancelled_before_it_begins_nothing_is_done(self, prepare, write):
        with prepare(write(*TEXTS)) as evaluation:
            evaluation.cancel()
            assert not evaluation.run()

            assert (0, None) == (evaluation.summary(["nll"])["scored"], evaluation.value("nll"))

    def test_a_read_that_fails_ends_it_and_what_is_done_stays(self, prepare, write):
        data, count = write(*TEXTS), 0
        with prepare(data) as evaluation:
            decode = evaluation._engine.decode

            def failing(*arguments):
                nonlocal count
                count += 1
                if count == 10:
                    raise ReadError("m.gguf: read of 4096 bytes at 8192 failed")
                return decode(*arguments)

            evaluation._engine.decode = failing
            with pytest.raises(ReadError, match="read of 4096 bytes"):
                evaluation.run()

        assert [2, 3, 4] == [item.line for item in prepare(data, resume=True).pending]


class TestAgainstResident:
    @pytest.mark.parametrize("records", [TEXTS[:2], CHOICES, PROBLEMS], ids=["text", "choice", "gsm8k"])
    def test_a_lossless_profile_agrees_everywhere_at_no_distance(self, prepare, write, records):
        with prepare(write(*records), Settings(tokens=6, against="resident")) as evaluation:
            evaluation.run()
            summary = evaluation.summary(["agreement", "kl"])

        agreement, kl = summary["metrics"]["agreement"], summary["metrics"]["kl"]
        assert (1.0, 1.0, 1.0) == (agreement["value"], agreement["low"], agreement["high"])
        assert (0.0, 0.0, 0.0) == (kl["value"], kl["low"], kl["high"])
        assert agreement["n"] == kl["n"] > summary["decoded_tokens"] - 1

    def test_another_model_is_at_a_distance(self, prepare, write, models):
        """The resident run is really another process with its own weights: here they are those of another seed."""
        with contextlib.ExitStack() as stack:
            evaluation = stack.enter_context(prepare(write(*TEXTS[:2])))
            other = resolve(PROFILE, model=str(models.path(locality=0.6, seed=1)))
            evaluation._reference = stack.enter_context(Reference(other))
            evaluation.run()
            summary = evaluation.summary(["agreement", "kl", "nll_delta"])

        assert summary["metrics"]["agreement"]["value"] < 1
        assert summary["metrics"]["kl"]["value"] > 0
        assert 0.0 != summary["metrics"]["nll_delta"]["value"]

    def test_its_profile_has_the_plans_sizes_and_nothing_that_streams(self, model):
        plan = resolve(PROFILE, model=model, overrides=['sink=[{plugin="jsonl",options={path="x"}}]'])
        table = resident(plan)

        assert {"enabled": False} == table["stream"]
        assert (model, plan.threads, plan.ctx, plan.ubatch) == tuple(
            table["model"][key] for key in ("path", "threads", "ctx", "ubatch")
        )
        assert set() == {"cache", "fetch", "sink", "routing"} & set(table)
        assert not resolve(table).lossy

    def test_its_failures_are_one_line(self, model):
        plan = resolve(PROFILE, model=model)
        gone = "the resident run failed: cannot go back to 9 tokens"
        with Reference(plan) as reference, pytest.raises(NativeError, match=gone):
            reference.rewind(9)
        with Reference(plan) as reference:
            os.kill(reference._process.pid, signal.SIGKILL)
            with pytest.raises(NativeError, match="the resident run ended by signal 9: it said nothing; perhaps"):
                reference.feed([5])

    def test_it_ends_with_the_evaluation(self, prepare, write):
        with prepare(write(*CHOICES), Settings(against="resident")) as evaluation:
            process = evaluation._reference._process

        assert 0 == process.returncode


def test_a_fingerprint_is_of_header_and_data(model, tmp_path):
    plan = resolve(PROFILE, model=model)
    other = tmp_path / "other.gguf"
    data = bytearray(Path(model).read_bytes())
    data[min(tensor.offset for tensor in plan.facts.dense)] ^= 1
    other.write_bytes(data)
    changed = resolve(PROFILE, model=str(other))

    assert fingerprint(plan.facts) != fingerprint(changed.facts)
