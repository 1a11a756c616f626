"""Telemetry: records as JSON, what is read from /proc, and sinks that fail."""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import re
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bmoe.contracts import RunRecord, RunSummary, TokenRecord
from bmoe.errors import PluginError
from bmoe.machine import read_machine
from bmoe.process import ProcessCounters
from bmoe.telemetry import SCHEMA, FanOut, filesystem, machine_facts, record_json, versions

RUN = RunRecord(
    "r1", "m.gguf", "qwen3moe", {"bmoe": "1"}, {"cpus": 2}, {"cache": {"policy": "lru"}}, {}, notices=("n",)
)
RECORDS = (RunRecord, TokenRecord, RunSummary)
REFERENCE = Path(__file__).parents[1] / "docs" / "reference" / "telemetry.md"


class Recorder:
    """A sink that remembers its calls and raises in the methods named."""

    def __init__(self, *raises: str, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, object]] = []
        self._raises, self._error = raises, error or RuntimeError("disk full")

    def _note(self, name, value):
        self.calls.append((name, value))
        if name in self._raises:
            raise self._error

    def open(self, run, /):
        self._note("open", run)

    def token(self, record, /):
        self._note("token", record)

    def close(self, summary, /):
        self._note("close", summary)

    @property
    def names(self):
        return [name for name, _ in self.calls]


class TestRecordJson:
    def test_every_field_of_a_token_is_there_and_unmeasured_is_null(self):
        out = json.loads(json.dumps(record_json(TokenRecord(3, 42, "é"))))

        assert {"event": "token", "schema": SCHEMA, "index": 3, "token_id": 42, "text": "é"}.items() <= out.items()
        names = {f.name for f in dataclasses.fields(TokenRecord)}
        assert names | {"event", "schema", "compute_s"} == set(out)
        assert {out[name] for name in names - {"index", "token_id", "text"}} == {None}

    def test_the_residual_is_what_was_not_measured_inside_the_decode(self):
        record = TokenRecord(1, 1, "a", decode_s=0.5, read_wait_s=0.25, manage_s=0.125)

        assert 0.125 == record_json(record)["compute_s"]

    def test_a_run_keeps_its_tables_and_lists(self):
        out = json.loads(json.dumps(record_json(RUN)))

        assert "run" == out["event"]
        assert {"cache": {"policy": "lru"}} == out["profile"]
        assert ["n"] == out["notices"]

    def test_numbers_that_json_lacks_become_null(self):
        out = record_json(TokenRecord(1, 1, "a", decode_s=math.inf, between_s=math.nan))

        assert (None, None) == (out["decode_s"], out["between_s"])

    def test_paths_that_are_not_utf8_still_make_valid_json(self):
        run = dataclasses.replace(RUN, model=os.fsdecode(b"/models/\xff.gguf"))

        assert run.model == json.loads(json.dumps(record_json(run)).encode("ascii"))["model"]


class TestMachine:
    def test_the_file_system_is_that_of_the_deepest_mount(self, tmp_path):
        deep = tmp_path / "with space" / "deeper"
        deep.mkdir(parents=True)
        root = os.path.realpath(tmp_path)
        lines = [
            "1 1 8:1 / / rw - ext4 /dev/a rw",
            f"2 1 8:2 / {root}/with\\040space rw,relatime shared:1 - f2fs /dev/b rw",
            f"3 1 8:3 / {root}/with rw - xfs /dev/c rw",
        ]
        (tmp_path / "self").mkdir()
        (tmp_path / "self" / "mountinfo").write_text("\n".join(lines) + "\n")

        assert ("f2fs", "/dev/b") == filesystem(str(deep / "m.gguf"), str(tmp_path))
        assert ("ext4", "/dev/a") == filesystem("/elsewhere", str(tmp_path))

    def test_a_later_mount_hides_the_one_below_it(self, tmp_path):
        (tmp_path / "self").mkdir()
        (tmp_path / "self" / "mountinfo").write_text(
            "1 1 8:1 / / rw - rootfs none rw\n2 1 8:2 / / rw - erofs /dev/x ro\n"
        )

        assert ("erofs", "/dev/x") == filesystem("/any", str(tmp_path))

    def test_without_proc_everything_that_it_tells_is_unmeasured(self, tmp_path):
        facts = machine_facts("/m.gguf", tmp_path)

        unknown = ("memory_bytes", "filesystem", "device", "pressure")
        assert [None] * len(unknown) == [facts[name] for name in unknown]
        json.dumps(facts)

    def test_processors_are_those_that_threads_are_counted_by(self, tmp_path):
        for name, text in (("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", "100000 100000\n")):
            path = tmp_path / name
            path.parent.mkdir(parents=True)
            path.write_text(text)

        assert 1 == machine_facts("/m.gguf", tmp_path)["cpus"] == read_machine(tmp_path).cpus

    def test_versions_name_what_a_figure_depends_on(self):
        found = versions()

        assert {"bmoe", "python", "llama-cpp-python", "numpy", "kernel"} == set(found)
        assert all(found.values())


class TestProcessCounters:
    @staticmethod
    def _proc(root, rss, swap, total):
        (root / "self").mkdir(exist_ok=True)
        (root / "pressure").mkdir(exist_ok=True)
        kinds = f"RssAnon:\t  {rss - 30} kB\nRssFile:\t  20 kB\nRssShmem:\t  10 kB\n"
        status = f"Name:\tpython\nVmHWM:\t  900 kB\nVmRSS:\t  {rss} kB\n{kinds}VmSwap:\t  {swap} kB\n"
        (root / "self" / "status").write_text(status)
        (root / "pressure" / "io").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\nfull total=1\n")

    def test_sizes_are_as_they_are_and_stalls_since_the_last_sample(self, tmp_path):
        self._proc(tmp_path, 100, 5, 1000)
        counters = ProcessCounters(str(tmp_path))
        self._proc(tmp_path, 200, 7, 1250)
        first = counters.sample()
        second = counters.sample()
        counters.close()

        assert (200 * 1024, 7 * 1024, 250) == (first.rss_bytes, first.swap_bytes, first.psi_some_us)
        assert 0 == second.psi_some_us
        assert (170 * 1024, 20 * 1024, 10 * 1024) == (
            first.rss_anon_bytes,
            first.rss_file_bytes,
            first.rss_shmem_bytes,
        )

    def test_page_faults_of_this_process_are_counted(self):
        counters = ProcessCounters()
        with mmap.mmap(-1, 1 << 20) as fresh:  # memory that no heap has had before
            fresh[: len(fresh)] = b"x" * len(fresh)
            sample = counters.sample()
        counters.close()

        assert sample.minflt is not None
        assert sample.minflt > 0

    def test_what_the_system_does_not_tell_is_unmeasured(self, tmp_path):
        counters = ProcessCounters(str(tmp_path))
        sample = counters.sample()

        assert (None, None, None) == (sample.rss_bytes, sample.swap_bytes, sample.psi_some_us)
        assert counters.peak_rss_bytes() is None

    def test_what_others_had_of_the_processors_leaves_out_waiting_and_this_process(self, tmp_path, monkeypatch):
        monkeypatch.setattr(time, "process_time", lambda: 2.0)
        hertz = os.sysconf("SC_CLK_TCK")
        fields = [3, 1, 2, 500, 400, 1, 1, 1, 9, 9]  # user nice system idle iowait irq softirq steal guest guest_nice
        (tmp_path / "stat").write_text(f"cpu  {' '.join(str(hertz * n) for n in fields)}\ncpu0 1 2 3\n")
        counters = ProcessCounters(str(tmp_path))

        assert counters.others_s() == 3 + 1 + 2 + 1 + 1 + 1 - 2.0
        groups = [tmp_path / "none", tmp_path / "one", tmp_path / "two"]
        for folder, stat in (
            ("one", "nr_throttled 1\nthrottled_usec 500000\n"),
            ("two", "throttled_time 1500000000\n"),
        ):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "cpu.stat").write_text(stat)
        assert ProcessCounters(str(tmp_path), groups).others_s() == counters.others_s() + 1.5
        (tmp_path / "stat").write_text("nothing\n")
        assert counters.others_s() is None

    def test_closing_twice_is_harmless_and_ends_the_measuring(self, tmp_path):
        self._proc(tmp_path, 100, 0, 1)
        counters = ProcessCounters(str(tmp_path))
        counters.close()
        counters.close()

        assert counters.sample().rss_bytes is None

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
    def test_it_reads_descriptors_that_stay_open(self):
        """A sample costs no path look-up; opening files for each token would cost several times as much."""
        counters = ProcessCounters()
        opened: list[str] = []
        original = os.open
        os.open = lambda *a, **k: opened.append(a[0]) or original(*a, **k)
        try:
            sample = counters.sample()
        finally:
            os.open = original
            counters.close()

        assert [] == opened
        assert sample.rss_bytes is not None
        assert sample.rss_bytes > 1 << 20


class TestFanOut:
    def test_every_sink_sees_every_record_in_order(self):
        first, second = Recorder(), Recorder()
        fan = FanOut([first, second])
        fan.open(RUN)
        fan.token(TokenRecord(0, 1, "a"))
        fan.close(None)

        expected = [("open", RUN), ("token", TokenRecord(0, 1, "a")), ("close", None)]
        assert (expected, expected) == (first.calls, second.calls)

    def test_a_sink_that_raises_is_closed_reported_once_and_never_stops_the_others(self):
        bad, good = Recorder("token", "close"), Recorder()
        with capture_logs() as logs:
            fan = FanOut([bad, good])
            fan.open(RUN)
            for index in range(3):
                fan.token(TokenRecord(index, 1, "a"))
            fan.close(None)

        assert ["open", "token", "close"] == bad.names
        assert ["open", "token", "token", "token", "close"] == good.names
        assert [("sink failed", "sink.0", "RuntimeError: disk full")] == [
            (line["event"], line["path"], line["reason"]) for line in logs
        ]

    def test_a_failed_sink_takes_part_again_in_the_next_run(self):
        sink = Recorder("token")
        fan = FanOut([sink])
        for _ in range(2):
            fan.open(RUN)
            fan.token(TokenRecord(0, 1, "a"))
            fan.close(None)

        assert ["open", "token", "close"] * 2 == sink.names

    def test_a_sink_that_cannot_open_is_an_error_with_its_place_and_closes_the_earlier_ones(self):
        good = Recorder()
        bad = Recorder("open", error=PluginError('options.path = "x": Permission denied'))

        with pytest.raises(PluginError, match=r'^sink\.1\.options\.path = "x": Permission denied$'):
            FanOut([good, bad]).open(RUN)
        assert ["open", "close"] == good.names

    def test_any_other_failure_to_open_names_the_sink(self):
        with pytest.raises(PluginError, match=r"^sink\.0: Recorder cannot open: RuntimeError: disk full$"):
            FanOut([Recorder("open")]).open(RUN)

    def test_a_user_who_interrupts_is_not_a_failing_sink(self):
        sink = Recorder("token", error=KeyboardInterrupt())  # type: ignore[arg-type]
        fan = FanOut([sink])
        fan.open(RUN)

        with pytest.raises(KeyboardInterrupt):
            fan.token(TokenRecord(0, 1, "a"))

    def test_closing_twice_closes_each_sink_once(self):
        sink = Recorder()
        fan = FanOut([sink])
        fan.open(RUN)
        fan.close(None)
        fan.close(None)

        assert ["open", "close"] == sink.names


class TestReference:
    @pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
    def test_the_reference_describes_exactly_the_fields_there_are(self, kind):
        text = REFERENCE.read_text(encoding="utf-8")
        section = re.search(rf"^## .*`{kind.__name__}`.*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section is not None
        rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", section[1], re.MULTILINE)

        derived = {"compute_s"} if kind is TokenRecord else set()
        assert [f.name for f in dataclasses.fields(kind)] == [name for name, *_ in rows if name not in derived]
        assert derived <= {name for name, *_ in rows}

    @pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
    def test_units_agree_with_the_ends_of_names(self, kind):
        ends = {"_bytes": "bytes", "_s": "seconds", "_us": "microseconds"}
        for name, unit in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE):
            for end, expected in ends.items():
                if name.endswith(end) and name != "tok_s":
                    assert expected == unit.strip(), name
