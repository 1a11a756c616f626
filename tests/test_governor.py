"""Whether it pays to read ahead: a prefetcher that loses is off within 50 tokens, one that helps is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import pytest
from structlog.testing import capture_logs

from bmoe import expert_key
from bmoe.budget import MIB, size_budget
from bmoe.contracts import ExpertKey, Facts, Options, RoutingEvent
from bmoe.engine import Engine
from bmoe.governor import Governor, longer
from bmoe.native import memory
from bmoe.resolve import resolve
from bmoe.synth import SHAPES
from bmoe.testing.models import TinyModels

ENTRY = 1000


def drive(governor: Governor, tokens: int, with_s: float, without_s: float, used: float, seed: int = 0) -> int:
    """Decode ``tokens``; times are spread by a third. How many were decoded before it was switched off."""
    draw = Random(seed)
    for token in range(tokens):
        on = governor.is_on
        took = (with_s if on else without_s) * draw.uniform(0.7, 1.3)
        read = 4 * ENTRY if on else 0
        if governor.token(took, read, int(read * used)):
            return token + 1
    return tokens


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("with_s", "used"), [(0.010, 0.0), (0.020, 1.0), (0.010, 0.2)], ids=["useless", "slow", "few"])
def test_one_that_loses_is_off_within_50_tokens(with_s: float, used: float, seed: int) -> None:
    governor = Governor(ENTRY)
    assert drive(governor, 200, with_s, 0.010, used, seed) <= 50
    assert governor.note
    assert governor.allowed() == 0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("with_s", [0.005, 0.009])
def test_one_that_helps_stays_on(with_s: float, seed: int) -> None:
    governor = Governor(ENTRY)
    assert drive(governor, 3000, with_s, 0.010, 0.8, seed) == 3000
    assert governor.note == ""
    assert governor.off_tokens == 0


def test_what_gets_slower_or_faster_over_time_is_no_difference_of_the_two() -> None:
    for factor in (0.97, 1.03):
        governor, stall = Governor(ENTRY), 0.010
        for _ in range(400):
            stall = min(1.0, max(1e-4, stall * factor))
            assert not governor.token(stall * (0.7 if governor.is_on else 1.0), 4 * ENTRY, 4 * ENTRY)


def test_few_tokens_are_without_once_it_came_through_its_trial() -> None:
    governor = Governor(ENTRY)
    drive(governor, 100, 0.005, 0.010, 0.8)
    without = 0
    for _ in range(640):
        without += not governor.is_on
        governor.token(0.005 if governor.is_on else 0.010, ENTRY, ENTRY)

    assert 10 <= without <= 0.05 * 640


@pytest.mark.parametrize("seed", range(5))
def test_one_that_becomes_bad_is_off_within_50_tokens_of_it(seed: int) -> None:
    governor = Governor(ENTRY)
    drive(governor, 500, 0.005, 0.010, 0.8, seed)
    assert drive(governor, 200, 0.012, 0.010, 0.0, seed) <= 50


def test_it_is_tried_again_later_and_later_and_comes_back_when_it_helps() -> None:
    governor, off = Governor(ENTRY), []
    for _ in range(8):
        assert drive(governor, 60, 0.010, 0.010, 0.0) <= 50
        pause = 0
        while governor.token(0.010, 0, 0):
            pause += 1
        off.append(pause + 1)
    assert off == [64, 128, 256, 512, 1024, 2048, 4096, 4096]
    assert governor.off_tokens == sum(off)

    assert drive(governor, 300, 0.005, 0.010, 0.9) == 300
    drive(governor, 60, 0.010, 0.010, 0.0)
    assert "off for 64 tokens" in governor.note, "a trial that was passed is a new start"


def test_switching_off_is_said_once_with_the_reason() -> None:
    with capture_logs() as logs:
        governor = Governor(ENTRY)
        drive(governor, 60, 0.010, 0.010, 0.0)
        governor.token(0.010, 0, 0)

    (line,) = logs
    assert line["event"] == "read-ahead does not pay"
    assert "0 % were used" in line["seen"]


def test_the_rank_test_is_that_of_the_textbook() -> None:
    """U = 20 of 20 pairs: (20 - 10) / sqrt(5 · 4 · 10 / 12)."""
    one = ([6.0, 7, 8, 9, 10], [1.0, 2, 3, 4])
    assert longer([one]) == pytest.approx(10 / (5 * 4 * 10 / 12) ** 0.5)
    assert longer([one, (one[1], one[0])]) == 0
    assert longer([([1.0, 1.0], [1.0])]) == 0
    assert longer([]) == 0


# ---- in an engine


class Script:
    """Suggests the next layer's experts as they were when it ``knew`` them, all of them wrong if told so."""

    wants = frozenset({"topk"})
    note = ""

    def __init__(self) -> None:
        self.suggesting: Callable[[int], Sequence[ExpertKey]] = lambda layer: ()
        self.seen: dict[tuple[int, int], list[ExpertKey]] = {}
        self.position = 0
        self.sleeps_s = 0.0

    def observe(self, event: RoutingEvent, /) -> None:
        time.sleep(self.sleeps_s)
        self.position = event.batch.positions[-1]
        self.seen[self.position, event.layer] = [expert_key(event.layer, e) for e in event.ids[-1].tolist()]

    def suggest(self, layer: int, /) -> Sequence[ExpertKey]:
        return self.suggesting(layer)


class Slow:
    """A fetcher whose demanded reads take long, while those ahead come in between."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.direct, self.note = inner.direct, inner.note

    def submit(self, reads: Any, /, *, ahead: bool = False) -> Any:
        if not ahead:
            time.sleep(0.001 * len(set(reads.offset.tolist())))
        return self._inner.submit(reads, ahead=ahead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture(name="opened")
def _opened(tmp_path: Path) -> Iterator[tuple[Engine, Script]]:
    shape = replace(SHAPES["tiny-qwen3moe"], name="many", n_expert=48, n_embd=128, n_ff_exp=128)
    plan = resolve(
        {
            "model": {"path": str(TinyModels(tmp_path).path(shape, "F32")), "threads": 1, "ctx": 512},
            "cache": {"policy": "lru", "budget_mb": 1024, "watch": "off"},
            "fetch": {"plugin": "pread"},
            "prefetch": {"policy": "temporal"},
            "sampling": {"temp": 3.0, "seed": 7},  # or it would say the same token again and again
        }
    )
    amount, script, real = int(plan.facts.expert_bytes * 0.3), Script(), plan.fetch.provider

    def fetch(options: Options, facts: Facts) -> Any:
        return Slow(real.build(options, facts))

    assert plan.prefetch is not None
    plan = replace(
        plan,
        budget=size_budget(amount, amount / MIB, plan.facts, memory.PAGE, ahead=True),
        fetch=replace(plan.fetch, provider=replace(real, build=fetch)),
        prefetch=replace(plan.prefetch, provider=replace(plan.prefetch.provider, build=lambda options, facts: script)),
    )
    with Engine(plan) as engine:
        yield engine, script


def run(engine: Engine, n: int) -> tuple[list[Any], Any]:
    with engine.conversation() as conversation:
        records = [token.record for token in conversation.generate([5, 17, 3], n)]
        return records, conversation.summary


class Patient(Governor):
    """One that never compares and never switches off, so that every routing is seen."""

    def token(self, took_s: float, read_bytes: int, used_bytes: int) -> bool:
        return False


def learn(engine: Engine, n: int) -> list[Any]:
    """The records of a run of which every routing is seen; the next one is judged."""
    lane, entry_bytes = engine.stream.lane, engine.facts.banks[0].entry_bytes
    lane.governor = Patient(entry_bytes)
    known, _ = run(engine, n)
    lane.governor = Governor(entry_bytes)
    return known


def foresee(engine: Engine, script: Script, n: int) -> list[Any]:
    """As :func:`learn`; from then on the experts that the next layer used are suggested."""
    known = learn(engine, n)
    coming, last = dict(script.seen), max(bank.layer for bank in engine.facts.banks)

    def suggesting(layer: int) -> Sequence[ExpertKey]:
        return coming.get((script.position + 1, 0) if layer == last else (script.position, layer + 1), ())

    script.suggesting = suggesting
    return known


def test_a_prefetcher_that_is_never_right_ends_within_50_tokens_and_the_summary_says_so(opened) -> None:
    engine, script = opened
    learn(engine, 120)
    used = {key for keys in script.seen.values() for key in keys}
    layers = [bank.layer for bank in engine.facts.banks]
    wrong = {
        layer: [expert_key(layers[(at + 1) % len(layers)], e) for e in range(48)] for at, layer in enumerate(layers)
    }
    wrong = {layer: [key for key in keys if key not in used] for layer, keys in wrong.items()}
    assert all(wrong.values())
    turn = iter(range(10**6))
    script.suggesting = lambda layer: [wrong[layer][next(turn) % len(wrong[layer])] for _ in range(3)]

    records, summary = run(engine, 64)

    assert sum(record.speculative_bytes for record in records[1:51]) > 0
    assert sum(record.speculative_bytes for record in records[51:]) == 0, "off, until it is tried again"
    assert summary.ahead_bytes <= 50 * 16 * engine.facts.banks[0].entry_bytes
    assert summary.ahead_used_bytes == 0
    assert summary.ahead_wasted_bytes == summary.ahead_bytes, "what was guessed is given up"
    assert summary.ahead_off_tokens >= 13
    assert "0 % were used" in summary.ahead_note
    assert not engine.stream.store.guesses


def test_a_prefetcher_that_is_always_right_stays_on(opened) -> None:
    engine, script = opened
    known = foresee(engine, script, 120)
    records, summary = run(engine, 120)

    assert [r.token_id for r in records] == [r.token_id for r in known]
    assert summary.ahead_note == ""
    assert summary.ahead_off_tokens == 0
    assert summary.ahead_used_bytes > 0.8 * summary.ahead_bytes > 0


def test_a_prefetcher_that_shortens_the_wait_and_makes_the_token_longer_ends_within_50_tokens(opened) -> None:
    engine, script = opened
    foresee(engine, script, 120)
    script.sleeps_s = 0.020

    records, summary = run(engine, 64)

    on, off = [r for r in records[1:51] if r.speculative_bytes], records[51:]
    assert mean(r.read_wait_s for r in on) < mean(r.read_wait_s for r in off), "its guesses save waiting"
    assert median(r.decode_s for r in on) > 0.08 > median(r.decode_s for r in off), "a sleep in each of four layers"
    assert "with and without it a token took" in summary.ahead_note
    assert summary.ahead_off_tokens >= 13
    assert not any(r.speculative_bytes for r in off)
    assert script.position < 3 + 50, "it is not even shown what is routed"


class Off(Governor):
    """One that has switched off for good."""

    @property
    def is_on(self) -> bool:
        return False

    def token(self, took_s: float, read_bytes: int, used_bytes: int) -> bool:
        return True


def test_while_it_is_off_the_cache_hits_as_without_a_prefetcher_and_then_gives_the_room_back(opened) -> None:
    engine, script = opened
    lane, store, entry_bytes = engine.stream.lane, engine.stream.store, engine.facts.banks[0].entry_bytes
    lane.governor = Off(entry_bytes)
    run(engine, 2)
    _, summary = run(engine, 40)

    assert store.budget_bytes >= store.held_bytes > store.budget_bytes - store.room_bytes
    lane.governor = Patient(entry_bytes)
    run(engine, 2)
    script.suggesting = lambda layer: [expert_key((layer + 1) % 4, e) for e in range(48)]
    for _ in range(3):
        run(engine, 12)
    assert store.guesses
    assert store.held_bytes <= store.budget_bytes

    plan = replace(engine.plan, prefetch=None, budget=replace(engine.plan.budget, room=0))
    with Engine(plan) as other:
        run(other, 2)
        _, plain = run(other, 40)
        assert (summary.lookups, summary.hits) == (plain.lookups, plain.hits)
        assert 0 < plain.hits < plain.lookups


def test_a_prefetcher_that_has_given_up_is_left_alone_and_leaves_its_room_to_the_cache(opened) -> None:
    engine, script = opened
    run(engine, 2)
    script.note = "the graph does not show it"
    run(engine, 2)
    script.seen.clear()

    _, summary = run(engine, 40)

    store = engine.stream.store
    assert not script.seen
    assert summary.ahead_note == script.note
    assert store.budget_bytes >= store.held_bytes > store.budget_bytes - store.room_bytes


def test_without_a_prefetcher_there_is_nothing_to_say(tmp_path: Path) -> None:
    with Engine(resolve({"model": {"path": str(TinyModels(tmp_path).path()), "threads": 1}})) as engine:
        _, summary = run(engine, 3)

    assert (summary.ahead_bytes, summary.ahead_off_tokens, summary.ahead_note) == (None, None, None)
