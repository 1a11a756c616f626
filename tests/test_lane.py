"""The read-ahead lane of an open engine: guesses are read, used, judged and given up, and never change the output."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bmoe import expert_key
from bmoe.budget import MIB, size_budget
from bmoe.contracts import ExpertKey, Facts, Options, ReadBatch, RoutingEvent
from bmoe.engine import Engine
from bmoe.errors import PluginError, ReadError
from bmoe.governor import Governor
from bmoe.native import memory
from bmoe.resolve import resolve
from bmoe.synth import SHAPES
from bmoe.testing.models import TinyModels

PROMPT = [5, 17, 3]
LONG = [(i * 37 + 11) % 512 for i in range(48)]


@dataclass
class Script:
    """A prefetcher that does what the test says, and notes what it sees."""

    suggesting: Callable[[int], Sequence[Any]] = lambda layer: ()
    seen: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    wants: frozenset[str] = frozenset({"topk"})

    def observe(self, event: RoutingEvent, /) -> None:
        self.seen.append((event.layer, event.ids.tolist()))

    def suggest(self, layer: int, /) -> Sequence[ExpertKey]:
        return self.suggesting(layer)


class Below:
    """Between the lane and a real fetcher: counts the tickets that are out, and lets reads ahead fail."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.direct, self.note = inner.direct, inner.note
        self.out: set[int] = set()
        self.ahead: dict[int, Any] = {}
        self.most = 0
        self.failing = False

    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Any:
        ticket = self._inner.submit(reads, ahead=ahead)
        if ahead:
            self.ahead[id(ticket)] = ticket
            self.most = max(self.most, sum(not self._inner.ready(t, 99) for t in self.ahead.values()))
        return ticket

    def wait(self, ticket: Any, upto: int, /) -> int:
        if self.failing and id(ticket) in self.ahead:
            self._inner.cancel(ticket)
            raise ReadError("the drive lost it")
        return int(self._inner.wait(ticket, upto))

    def ready(self, ticket: Any, upto: int, /) -> bool:
        return bool(self._inner.ready(ticket, upto))

    def cancel(self, ticket: Any, /) -> None:
        self._inner.cancel(ticket)
        if not self.failing:  # else it failed before: whether a guess was given up first is a matter of time
            self.ahead.pop(id(ticket), None)

    def close(self) -> None:
        self._inner.close()


class Patient(Governor):
    """One that never compares and never switches off."""

    def token(self, took_s: float, read_bytes: int, used_bytes: int) -> bool:
        return False


@dataclass
class Opened:
    engine: Engine
    script: Script
    below: Below

    @property
    def lane(self) -> Any:
        assert self.engine.stream is not None
        return self.engine.stream.lane

    @property
    def store(self) -> Any:
        assert self.engine.stream is not None
        return self.engine.stream.store

    def run(self, prompt: Sequence[int] = PROMPT, n: int = 8) -> str:
        """Digest of the logits of a generation."""
        with self.engine.conversation() as conversation:
            assert list(conversation.generate(list(prompt), n, hash_logits=True))
            assert conversation.summary is not None
            return str(conversation.summary.logits_sha256)

    def counted(self) -> tuple[int, ...]:
        c = self.store.counters
        return c.lookups, c.hits, c.admissions, c.evictions, c.rereads


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of whole pages, of which a short text uses a part."""
    shape = replace(SHAPES["tiny-qwen3moe"], name="many", n_expert=48, n_embd=128, n_ff_exp=128)
    return TinyModels(tmp_path_factory.mktemp("models")).path(shape, "F32")


@pytest.fixture(name="opened")
def _opened(model: Path) -> Iterator[Callable[..., Opened]]:
    engines: list[Engine] = []

    def opened(share: float = 0.5, overlap: str = "projection", fetcher: str = "pread") -> Opened:
        plan = resolve(
            {
                "model": {"path": str(model), "threads": 1, "ctx": 128, "ubatch": 16},
                "stream": {"overlap": overlap},
                "cache": {"policy": "lru", "budget_mb": 1024, "watch": "off"},
                "fetch": {"plugin": fetcher},
                "prefetch": {"policy": "temporal"},
            }
        )
        amount = int(plan.facts.expert_bytes * share)
        script, made, real = Script(), [], plan.fetch.provider

        def fetch(options: Options, facts: Facts) -> Any:
            made.append(Below(real.build(options, facts)))
            return made[0]

        assert plan.prefetch is not None
        plan = replace(
            plan,
            budget=size_budget(amount, amount / MIB, plan.facts, memory.PAGE, ahead=True),
            fetch=replace(plan.fetch, provider=replace(real, build=fetch)),
            prefetch=replace(
                plan.prefetch, provider=replace(plan.prefetch.provider, build=lambda options, facts: script)
            ),
        )
        assert plan.budget.room
        engines.append(Engine(plan))
        found = Opened(engines[-1], script, made[0])
        found.lane.governor = Patient(plan.facts.banks[0].entry_bytes)
        return found

    yield opened
    for engine in engines:
        engine.close()


def layers(engine: Engine) -> list[int]:
    return [bank.layer for bank in engine.facts.banks]


def foresight(opened: Opened, prompt: Sequence[int] = PROMPT) -> str:
    """Run once to learn the routing; from then on each layer's experts are suggested when the one before is routed."""
    opened.script.seen.clear()
    expected = opened.run(prompt)
    coming = [
        [expert_key(layer, e) for e in sorted({e for row in ids for e in row})] for layer, ids in opened.script.seen
    ]
    opened.script.seen.clear()

    def suggesting(layer: int) -> Sequence[ExpertKey]:
        at = len(opened.script.seen)
        return coming[at] if at < len(coming) else ()

    opened.script.suggesting = suggesting
    return expected


@pytest.mark.parametrize("overlap", ["off", "projection"])
def test_right_guesses_are_what_a_routing_finds_and_the_output_stays(opened, overlap: str) -> None:
    one = opened(0.3, overlap)
    expected = foresight(one)
    right, one.script.suggesting = one.script.suggesting, lambda layer: ()
    one.run(LONG)  # which leaves other experts in the cache
    one.script.seen.clear()
    one.script.suggesting = right
    demanded = one.engine.stream.counters.read_bytes

    assert expected == one.run()

    lane, again = one.lane.counters, one.engine.stream.counters.read_bytes - demanded
    assert lane.claimed > 0
    assert lane.used_bytes > 2 * again, "most of what was needed had been read ahead"
    assert lane.wasted_bytes == 0
    assert lane.used_bytes == lane.read_bytes


def test_guesses_that_nobody_uses_leave_the_cache_as_it_would_be(opened) -> None:
    silent, noisy = opened(0.4), opened(0.4)
    expected = [silent.run(), silent.run(LONG[:9])]
    used = {(layer, e) for layer, ids in silent.script.seen for row in ids for e in row}
    unused = {
        layer: [expert_key(layer, e) for e in range(48) if (layer, e) not in used] for layer in layers(noisy.engine)
    }
    assert all(len(keys) > 4 for keys in unused.values())
    turn = iter(range(10**6))

    def suggesting(layer: int) -> Sequence[ExpertKey]:
        keys = unused[(layer + 1) % len(unused)]
        return [keys[next(turn) % len(keys)], keys[next(turn) % len(keys)]]

    noisy.script.suggesting = suggesting

    assert expected == [noisy.run(), noisy.run(LONG[:9])]
    assert noisy.lane.counters.read_bytes > 0
    assert noisy.lane.counters.claimed == 0
    assert silent.counted() == noisy.counted()


def test_who_is_never_right_is_hardly_heard_and_who_is_right_again_is_trusted_again(opened) -> None:
    one = opened(0.3)
    foresight(one)
    right = one.script.suggesting
    used = {(layer, e) for layer, ids in one.script.seen for row in ids for e in row}
    wrong = [expert_key(layer, e) for layer in layers(one.engine) for e in range(48) if (layer, e) not in used]
    one.script.suggesting = lambda layer: wrong[layer * 7 % 40 :][:12]

    for _ in range(4):
        one.run(n=12)
    assert one.lane.governor._right < 0.2
    assert one.lane.governor.allowed() <= 1

    for _ in range(8):
        one.script.seen.clear()
        one.script.suggesting = right
        one.run()
    assert one.lane.governor._right > 0.5


@pytest.mark.parametrize(
    "bad", [-1, 1 << 60, "x", None, 3.5, expert_key(0, 48), expert_key(999, 0), expert_key(0, 0, 1)], ids=str
)
def test_what_is_no_entry_of_the_model_is_an_error_that_names_the_prefetcher(opened, bad: Any) -> None:
    one = opened()
    expected = one.run()
    one.script.suggesting = lambda layer: [bad]

    with pytest.raises(PluginError, match=f"the prefetcher Script suggests {re.escape(repr(bad))}, no entry"):
        one.run()

    one.script.suggesting = lambda layer: ()
    assert expected == one.run()


@pytest.mark.parametrize("method", ["observe", "suggest"])
def test_a_prefetcher_that_fails_ends_the_decode_as_itself_and_the_next_one_works(opened, monkeypatch, method) -> None:
    one = opened()
    expected = foresight(one)

    def fail(*arguments: object) -> None:
        raise RuntimeError("my table is empty")

    with monkeypatch.context() as patch:
        patch.setattr(one.script, method, fail)
        with pytest.raises(RuntimeError, match="my table is empty"):
            one.run()
    one.script.seen.clear()
    assert expected == one.run()


def test_a_guess_whose_read_fails_is_dropped_and_read_again_when_it_is_needed(opened) -> None:
    """A read that fails after it was claimed is one that was needed, and fails the decode as any."""
    one = opened(0.3)
    expected = one.run()
    entries = [expert_key(layer, e) for layer in layers(one.engine) for e in range(48)]
    turn = iter(range(10**6))
    one.script.suggesting = lambda layer: [entries[next(turn) * 13 % len(entries)] for _ in range(3)]
    one.below.failing = True

    failures = 0
    for _ in range(6):
        try:
            assert expected == one.run()
        except ReadError as error:
            assert "the drive lost it" in str(error)  # noqa: PT017 - it may fail or not
            failures += 1

    assert one.lane.counters.failed > failures
    one.below.failing = False
    one.script.suggesting = lambda layer: ()
    assert expected == one.run()


def test_a_prompt_that_is_read_in_layers_has_no_guesses(opened) -> None:
    one = opened(0.9)
    foresight(one)
    one.script.seen.clear()
    one.run()
    while not one.store.guesses:  # whatever is left of them
        one.script.suggesting = lambda layer: [expert_key((layer + 1) % 4, e) for e in range(48)]
        one.run(n=2)

    one.engine.stream.begin(_batch(64))

    assert not one.store.guesses
    assert all(one.below._inner.ready(ticket, 99) for ticket in one.below.ahead.values())


def test_guesses_never_take_the_cache_over_its_budget(opened) -> None:
    one = opened(0.3)
    held: list[int] = []
    draw = iter(range(10**6))

    def suggesting(layer: int) -> Sequence[ExpertKey]:
        held.append(one.store.held_bytes)
        return [expert_key((layer + 1) % 4, next(draw) * 7 % 48) for _ in range(8)]

    one.script.suggesting = suggesting
    for prompt in (PROMPT, LONG, LONG[:5]):
        one.run(prompt)

    assert max(held) <= one.store.budget_bytes
    assert one.below.most <= 64


def test_shrinking_with_guesses_in_memory_gives_their_pages_back_too(opened) -> None:
    one = opened(0.6)
    expected = foresight(one)
    one.script.suggesting = lambda layer: [expert_key((layer + 1) % 4, e) for e in range(40, 48)]
    one.run()
    assert one.store.guesses

    held = one.engine.resize_cache(one.engine.facts.expert_bytes * 0.35 / MIB)

    assert not one.store.guesses
    assert held <= one.store.budget_bytes
    assert 0 < one.store.room_bytes < one.store.budget_bytes
    one.script.seen.clear()
    assert expected == one.run()


def test_closing_leaves_nothing_in_flight(opened) -> None:
    one = opened(0.4)
    one.script.suggesting = lambda layer: [expert_key((layer + 1) % 4, e) for e in range(48)]
    one.run()

    one.engine.close()

    assert not one.below.ahead or all(one.below._inner.ready(t, 99) for t in one.below.ahead.values())


def test_a_stop_gives_up_what_was_guessed_and_the_next_run_is_as_before(opened) -> None:
    one = opened(0.4)
    expected = foresight(one)
    right = one.script.suggesting
    with one.engine.conversation() as conversation:
        one.script.seen.clear()
        for index, _ in enumerate(conversation.generate(PROMPT, 8)):
            if index == 2:
                break
    one.script.seen.clear()
    one.script.suggesting = right
    assert expected == one.run()


def test_tokens_tell_what_was_read_ahead_and_what_of_it_was_wasted(opened) -> None:
    one = opened(0.3)
    foresight(one)
    right, one.script.suggesting = one.script.suggesting, lambda layer: ()
    one.run(LONG)
    one.script.seen.clear()
    one.script.suggesting = right
    with one.engine.conversation() as conversation:
        records = [token.record for token in conversation.generate(PROMPT, 8)]

    assert records[0].wasted_bytes is None
    assert all(record.wasted_bytes == 0 for record in records[1:])
    assert sum(record.speculative_bytes for record in records) == one.lane.counters.read_bytes > 0


def _batch(count: int) -> Any:
    from bmoe.contracts import BatchContext

    return BatchContext("prefill", tuple(range(count)))
