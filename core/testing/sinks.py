"""The gate of sinks: subclass :class:`SinkGates`, name the plugin, and pytest proves the contract."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bmoe.contracts import Provider, RunRecord, RunSummary, Sink, TokenRecord
from bmoe.testing.caches import cache_facts
from bmoe.testing.load import load_provider
from bmoe.testing.terminal import Terminal

RUN = RunRecord("run", "made-up.gguf", "made-up", {"bmoe": "0"}, {"cpus": 1}, {"cache": {"policy": "lru"}}, {})
SUMMARY = RunSummary(
    tokens=3, prompt_tokens=2, tok_s=4.0, open_s=0.5, prefill_s=0.5, decode_s=0.5, hit_rate=0.75, lookups=96, hits=72,
    evictions=8, rereads=4, bytes_read=24 << 20, prefill_bytes=48 << 20, bytes_per_token=12.0 * 2**20, io_wait_s=0.125,
    manage_s=0.0625, cpu_s=0.5, open_read_bytes=None, open_peak_rss_bytes=None, peak_rss_bytes=None,
    dense_bytes=1 << 20, slot_bytes=0, cache_budget_bytes=64 << 20, cache_held_bytes=64 << 20, direct_io=True,
    seam="python", lossy=False, stop="length",
)  # fmt: skip
MEASURED = TokenRecord(
    1, 42, "é\n", decode_s=0.25, read_wait_s=0.0625, manage_s=0.03125, between_s=0.001, lookups=48, hits=36,
    demand_bytes=12 << 20, evictions=4, rereads=2,
)  # fmt: skip
UNMEASURED = TokenRecord(0, 7, "")
TOKENS = (UNMEASURED, MEASURED, dataclasses.replace(MEASURED, index=2, text="x" * 200))


@pytest.mark.gate
class SinkGates:
    """Proves that a sink keeps its contract. A subclass sets class attributes and nothing else.

    ``plugin`` is the entry point of group ``bmoe.plugins`` (``"bmoe"`` for in-tree ones) that provides ``provider``.
    ``options`` are the provider's; ``{folder}`` in a text stands for an empty folder, and a required option that is
    missing gets a path in it. The sink finds a terminal as ``sys.stderr``. ``replaces`` says that its file is not a log
    but a state, which each writing replaces.
    """

    plugin: ClassVar[str]
    provider: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    replaces: ClassVar[bool] = False

    @pytest.fixture(name="terminal")
    def _terminal(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
        with Terminal() as terminal:
            monkeypatch.setenv("TERM", "xterm")
            monkeypatch.setattr(sys, "stderr", terminal.stream)
            yield terminal

    @pytest.fixture(name="sink")
    def _sink(self, tmp_path: Path, terminal: Terminal) -> Sink:
        return self.build(tmp_path)

    def load(self) -> Provider[Sink]:
        """The provider under test, by name."""
        return load_provider("sink", self.plugin, self.provider)

    def build(self, folder: Path) -> Sink:
        """A fresh sink that may write to ``folder``."""
        provider = self.load()
        given = {k: v.replace("{folder}", str(folder)) if isinstance(v, str) else v for k, v in self.options.items()}
        for name, field in provider.options.model_fields.items():
            if field.is_required():
                given.setdefault(name, str(folder / name))
        return provider.build(provider.options(**given), cache_facts(8))

    def test_is_lossless(self) -> None:
        """Receiving records cannot change the output."""
        assert not self.load().lossy

    def test_leaves_something_behind(self, sink: Sink, tmp_path: Path, terminal: Terminal) -> None:
        """A run is seen in a file or on the terminal: a sink that does nothing fails."""
        before = _files(tmp_path)
        _run(sink, SUMMARY)
        terminal.stream.flush()
        assert _files(tmp_path) != before or terminal.wait(), "nothing was written anywhere"

    def test_leaves_standard_output_alone(self, sink: Sink, capfd: pytest.CaptureFixture[str]) -> None:
        """Standard output is the generated text's."""
        _run(sink, SUMMARY)
        assert capfd.readouterr().out == ""

    def test_takes_what_was_not_measured(self, sink: Sink) -> None:
        """None means unmeasured and is no reason to fail, nor is a run without a token."""
        sink.open(RUN)
        for index in range(5):
            sink.token(dataclasses.replace(UNMEASURED, index=index))
        sink.close(dataclasses.replace(SUMMARY, tok_s=None, hit_rate=None, bytes_per_token=None, io_wait_s=None))
        sink.open(RUN)
        sink.close(SUMMARY)

    def test_takes_several_runs_and_keeps_the_earlier(self, sink: Sink, tmp_path: Path) -> None:
        """Each generation opens the sink again; what an earlier one wrote stays."""
        _run(sink, SUMMARY)
        first = _files(tmp_path)
        _run(sink, SUMMARY)
        second = _files(tmp_path)
        assert first.keys() <= second.keys()
        assert self.replaces or [path for path, data in first.items() if not second[path].startswith(data)] == []

    def test_closes_after_a_failure_and_twice(self, sink: Sink) -> None:
        """A run that failed has no summary; closing again, or without a run, is harmless."""
        sink.close(None)
        sink.open(RUN)
        sink.token(MEASURED)
        sink.close(None)
        sink.close(None)


def _run(sink: Sink, summary: RunSummary | None) -> None:
    sink.open(RUN)
    for record in TOKENS:
        sink.token(record)
    sink.close(summary)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
