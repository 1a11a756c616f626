"""The probe chooses by what it measured, remembers per drive, and never fails an open."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bmoe import probe as probing
from bmoe.contracts import BankFacts, CacheFacts, Facts, FetchFacts, ModelFacts, ProjectionFacts, ReadBatch, ShardFacts
from bmoe.errors import NativeError
from bmoe.probe import Verdict, probe

SIZE = 96 << 20


class Clocked:
    """A fetcher that takes as long as it says, by a clock of the test's."""

    def __init__(self, seconds: float, log: list[Any]) -> None:
        self.seconds, self.log = seconds, log
        log.append("open")

    def submit(self, reads: ReadBatch, /) -> ReadBatch:
        assert len(reads) > 1
        self.log += list(zip(reads.shard.tolist(), reads.offset.tolist(), strict=True))
        return reads

    def wait(self, ticket: ReadBatch, upto: int, /) -> int:
        clock[0] += self.seconds
        return int(ticket.length.sum())

    def close(self) -> None:
        self.log.append("close")


clock = [0.0]


@pytest.fixture(name="world")
def _world(monkeypatch: pytest.MonkeyPatch) -> Facts:
    clock[0] = 0.0
    monkeypatch.setattr(probing.time, "perf_counter", lambda: clock[0])
    return facts_of("/models/m.gguf")


def facts_of(path: str, size: int = SIZE) -> Facts:
    bank = BankFacts(0, 0, 96, 8, (ProjectionFacts("t", "gate", 0, 4096 + 32, (size - 8192) // 96, "q4_0"),))
    model = ModelFacts(path, "m", "qwen3moe", (ShardFacts(path, size),), 1, 96, 8, 8, 8, 8, 0, (bank,), ())
    return Facts(model, CacheFacts(0, 0, 0), FetchFacts((path,), 4, True, 24))


def choose(facts: Facts, memory: Path | None = None, key: str = "drive", **seconds: float) -> tuple[Verdict, Any]:
    logs: dict[str, list[Any]] = {name: [] for name in seconds}
    table = {name: (lambda facts, n=name: Clocked(seconds[n], logs[n])) for name in seconds}
    return probe(table, facts, key, memory), logs


def test_the_one_that_is_clearly_faster_is_chosen_and_the_reason_says_by_how_much(world):
    verdict, logs = choose(world, aio=0.004, uring=0.002, pread=0.004)

    assert "uring" == verdict.name
    assert "probed: aio 1.05, uring 2.10, pread 1.05 GB/s" == verdict.why
    assert all(log[-1] == "close" for log in logs.values())


def test_a_difference_that_may_be_noise_changes_nothing(world):
    assert "aio" == choose(world, aio=0.0024, uring=0.002, pread=0.0022)[0].name


def test_no_place_is_read_twice_and_none_outside_the_experts(world):
    _, logs = choose(world, aio=0.002, uring=0.002)

    places = [entry for log in logs.values() for entry in log if not isinstance(entry, str)]
    assert 2 * 3 * 8 == len(places) == len(set(places))
    assert all(at % 4096 == 0 and 4096 < at < SIZE - (512 << 10) for _, at in places)


def test_a_slow_drive_ends_the_probe_early(world):
    _, logs = choose(world, aio=0.15, uring=0.15, pread=0.15)

    assert clock[0] <= 0.35
    assert 2 * 8 == sum(not isinstance(entry, str) for log in logs.values() for entry in log)


def test_a_candidate_that_cannot_open_or_read_is_not_chosen(world):
    def refuse(facts: Facts) -> Any:
        raise NativeError("no")

    class Broken(Clocked):
        def wait(self, ticket: ReadBatch, upto: int, /) -> int:
            raise NativeError("no")

    log: list[Any] = []
    table = {"a": refuse, "b": lambda facts: Broken(0, log), "c": lambda facts: Clocked(0.002, log)}

    assert "c" == probe(table, world, "drive", None).name
    assert "a" == probe({"a": refuse, "b": refuse}, world, "drive", None).name


def test_what_was_found_is_remembered_for_this_drive_and_these_candidates(world, tmp_path):
    memory = tmp_path / "deep" / "fetch.json"
    first, _ = choose(world, memory, aio=0.004, uring=0.002)
    again, logs = choose(world, memory, aio=0.002, uring=0.004)
    other, _ = choose(world, memory, "other", aio=0.002, uring=0.004)
    more, _ = choose(world, memory, aio=0.002, uring=0.004, pread=0.004)

    assert ("uring", "uring", "aio", "aio") == (first.name, again.name, other.name, more.name)
    assert {"aio": [], "uring": []} == logs
    assert f"{first.why}, remembered" == again.why
    assert ["fetch.json"] == os.listdir(memory.parent)
    assert 3 == len(json.loads(memory.read_text())["fetch"])


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}', '{"schema": 1, "fetch": 3}', "[" * 100_000])
def test_a_damaged_memory_is_replaced(world, tmp_path, text):
    memory = tmp_path / "fetch.json"
    memory.write_text(text)

    assert "uring" == choose(world, memory, aio=0.004, uring=0.002)[0].name
    assert "remembered" in choose(world, memory, aio=0.004, uring=0.002)[0].why


@pytest.mark.parametrize("entry", [None, 3, {}, {"plugin": "gone", "why": ""}, {"plugin": "aio", "why": 3}])
def test_an_entry_that_makes_no_sense_is_not_believed(world, tmp_path, entry):
    memory = tmp_path / "fetch.json"
    choose(world, memory, aio=0.004, uring=0.002)
    table = json.loads(memory.read_text())
    memory.write_text(json.dumps({"schema": 1, "fetch": dict.fromkeys(table["fetch"], entry)}))

    assert "remembered" not in choose(world, memory, aio=0.004, uring=0.002)[0].why


def test_a_memory_that_cannot_be_written_is_no_failure(world, tmp_path):
    (tmp_path / "file").write_text("in the way")

    assert "uring" == choose(world, tmp_path / "file" / "fetch.json", aio=0.004, uring=0.002)[0].name
    assert "uring" == choose(world, tmp_path, aio=0.004, uring=0.002)[0].name
    assert ["file"] == os.listdir(tmp_path)


def test_a_small_model_is_not_probed(world):
    verdict, logs = choose(facts_of("/models/m.gguf", 8 << 20), aio=0.004, uring=0.002)

    assert ("aio", {"aio": [], "uring": []}) == (verdict.name, logs)
    assert "too small" in verdict.why
