"""The sinks ``csv`` and ``prometheus``: what is in their files, over several runs, and what they refuse."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest
from pydantic import ValidationError

from bmoe.contracts import Cause, TokenRecord
from bmoe.errors import PluginError
from bmoe.testing.sinks import MEASURED, RUN, SUMMARY, TOKENS
from bmoe_plugins.sinks._file import FileOptions
from bmoe_plugins.sinks.csv import COLUMNS, Csv
from bmoe_plugins.sinks.prometheus import Prometheus, PrometheusOptions

ODD = dataclasses.replace(MEASURED, text='a "b",\n;é')


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def generate(sink: Csv | Prometheus, tokens: list[TokenRecord], run=RUN, summary=SUMMARY) -> None:
    sink.open(run)
    for token in tokens:
        sink.token(token)
    sink.close(summary)


class TestCsv:
    def test_a_row_for_each_token_of_several_runs_under_one_line_of_names(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        generate(Csv(FileOptions(path=str(path))), [*TOKENS, ODD])
        generate(Csv(FileOptions(path=str(path))), [MEASURED], dataclasses.replace(RUN, run_id="second"))

        found = rows(path)
        assert [RUN.run_id] * (len(TOKENS) + 1) + ["second"] == [row["run_id"] for row in found]
        assert list(COLUMNS) == list(found[0])
        assert ODD.text == found[len(TOKENS)]["text"]
        assert str(MEASURED.decode_s) == found[-1]["decode_s"]

    def test_what_was_not_measured_is_empty_and_never_0(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        generate(Csv(FileOptions(path=str(path))), [TokenRecord(0, 7, "x")])

        (row,) = rows(path)
        assert {""} == {value for name, value in row.items() if name not in ("run_id", "index", "token_id", "text")}

    @pytest.mark.parametrize("content", ["a,b\n1,2\n", "\0\0\0", "x" * 200_000])
    def test_a_file_with_something_else_in_it_is_refused_and_left_alone(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "t.csv"
        path.write_text(content)

        with pytest.raises(PluginError, match=r'^options\.path = ".*t\.csv": .*; name (another|a) file'):
            Csv(FileOptions(path=str(path)))
        assert content == path.read_text()

    def test_what_cannot_be_written_is_refused_before_the_model_is_read(self, tmp_path: Path) -> None:
        with pytest.raises(PluginError, match=r"No such file or directory; name a file in a directory"):
            Csv(FileOptions(path=str(tmp_path / "no" / "t.csv")))
        with pytest.raises(ValidationError, match="only a shell expands"):
            FileOptions(path="~/t.csv")

    def test_a_full_disk_is_an_error_that_names_the_option(self) -> None:
        sink = Csv(FileOptions(path="/dev/full"))
        sink.open(RUN)
        sink.token(MEASURED)

        with pytest.raises(PluginError, match=r'^options\.path = "/dev/full": No space left on device; make room'):
            sink.close(SUMMARY)


class TestPrometheus:
    def metrics(self, path: Path) -> dict[str, float]:
        from prometheus_client.parser import text_string_to_metric_families

        found = {}
        for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
            for sample in family.samples:
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "le")
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def test_counters_add_up_over_tokens_and_runs(self, tmp_path: Path) -> None:
        path = tmp_path / "bmoe.prom"
        sink = Prometheus(PrometheusOptions(path=str(path), interval_s=3600))
        token = TokenRecord(1, 5, "a", decode_s=0.5, lookups=10, hits=7, demand_bytes=100, rss_anon_bytes=77)
        causes = (Cause("drive", 0.5, "slow", "buy"),)
        for _ in range(2):
            generate(sink, [token, token], summary=dataclasses.replace(SUMMARY, causes=causes))

        found = self.metrics(path)
        assert (4, 2.0, 40, 28) == tuple(
            found[f"bmoe_{name}_total"] for name in ("tokens", "decode_seconds", "lookups", "hits")
        )
        assert 400 == found["bmoe_read_bytes_total{kind=demand}"]
        assert 77 == found["bmoe_memory_bytes{kind=anon}"]
        assert 2 == found[f"bmoe_runs_total{{stop={SUMMARY.stop}}}"]
        assert 2 == found["bmoe_slow_runs_total{cause=drive}"]
        assert 4 == found["bmoe_token_seconds_count"]

    def test_drafts_are_counted_by_what_became_of_them(self, tmp_path: Path) -> None:
        path = tmp_path / "bmoe.prom"
        token = TokenRecord(
            1, 5, "a", decode_s=0.5, draft_s=0.25, demand_bytes=100, drafted=4, accepted=3, draft_bytes=30,
            rejected_bytes=20,
        )  # fmt: skip
        generate(Prometheus(PrometheusOptions(path=str(path))), [token, token])

        found = self.metrics(path)
        assert (8, 6, 0.5) == tuple(
            found[f"bmoe_{name}_total"] for name in ("drafted_tokens", "accepted_tokens", "draft_seconds")
        )
        read = {kind: found[f"bmoe_read_bytes_total{{kind={kind}}}"] for kind in ("demand", "draft", "rejected")}
        assert read == {"demand": 200, "draft": 60, "rejected": 40}
        assert found["bmoe_token_seconds_sum"] == 1.5

    def test_the_time_of_the_prompt_is_no_time_of_a_token(self, tmp_path: Path) -> None:
        path = tmp_path / "bmoe.prom"
        generate(Prometheus(PrometheusOptions(path=str(path))), [TokenRecord(0, 5, "a", decode_s=9.0)])

        assert 0 == self.metrics(path)["bmoe_token_seconds_count"]

    def test_the_file_is_whole_at_any_time(self, tmp_path: Path) -> None:
        path = tmp_path / "bmoe.prom"
        sink = Prometheus(PrometheusOptions(path=str(path), interval_s=0))
        sink.open(RUN)
        for index in range(20):
            sink.token(TokenRecord(index, 5, "a", decode_s=0.1))
            assert index + 1 == self.metrics(path)["bmoe_tokens_total"]
        sink.close(None)

        assert [path] == list(tmp_path.iterdir())

    def test_what_it_cannot_write_is_refused_before_the_model_is_read(self, tmp_path: Path) -> None:
        with pytest.raises(PluginError, match=r"No such file or directory; name a file in a directory"):
            Prometheus(PrometheusOptions(path=str(tmp_path / "no" / "x.prom")))
        with pytest.raises(ValidationError, match=r"must end in \.prom"):
            PrometheusOptions(path="x.txt")
