"""Generating, cancelling, continuing and sampling, on a real tiny model; every run is held against a fresh one."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import bmoe
from bmoe import Conversation, Engine, Token
from bmoe.errors import ModelError
from bmoe.native.sampler import Sampler, SamplingOptions
from bmoe.testing.models import TinyModels
from bmoe_plugins.fetch.pread import PreadFetcher

PROFILE = {"model": {"threads": 1, "ctx": 256, "ubatch": 16}, "fetch": {"plugin": "pread"}}
OFF, SOME = "cache.budget_mb=0", "cache.budget_mb=2"
PROMPT = [5, 300, 301, 7, 280, 412, 33]
LONG = [(i * 37 + 11) % 512 for i in range(50)]


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TinyModels(tmp_path_factory.mktemp("models")).path())


Open = Callable[..., Engine]


@pytest.fixture(name="opened")
def _opened(model: str) -> Iterator[Open]:
    engines: list[Engine] = []

    def opened(*overrides: str, path: str = model) -> Engine:
        engines.append(bmoe.open(PROFILE, model=path, overrides=overrides))
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()


def run(conversation: Conversation, prompt: str | Sequence[int], n: int, **how: bool) -> tuple[list[int], str | None]:
    """Token ids and the hash of their logits."""
    tokens = [token.id for token in conversation.generate(prompt, n, hash_logits=True, **how)]
    assert conversation.summary is not None
    return tokens, conversation.summary.logits_sha256


def stop_of(conversation: Conversation) -> str:
    assert conversation.summary is not None
    return conversation.summary.stop


# ---- one after the other


@pytest.mark.parametrize("budget", [OFF, SOME])
def test_a_second_generation_equals_a_fresh_one(opened: Open, budget: str) -> None:
    with opened(budget) as engine, engine.conversation() as fresh:
        expected = run(fresh, PROMPT, 8)
    with opened(budget) as engine, engine.conversation() as conversation:
        run(conversation, LONG, 5)

        assert expected == run(conversation, PROMPT, 8)
        assert expected == run(conversation, PROMPT, 8)
        assert PROMPT + expected[0][:-1] == conversation.tokens


def test_append_continues_where_the_conversation_stands(opened: Open) -> None:
    engine = opened(SOME)
    with engine.conversation() as whole, engine.conversation() as parts:
        expected = [token.id for token in whole.generate(PROMPT, 9)]
        first = [token.id for token in parts.generate(PROMPT, 4)]
        # the last token was chosen and not yet decoded
        second = [token.id for token in parts.generate(first[-1:], 5, append=True)]

        assert expected == first + second
        assert whole.tokens == parts.tokens


def test_append_to_nothing_is_a_plain_start(opened: Open) -> None:
    engine = opened(SOME)
    with engine.conversation() as plain, engine.conversation() as appended:
        assert run(plain, PROMPT, 4) == run(appended, PROMPT, 4, append=True)


def test_a_prompt_of_text_is_tokenized(opened: Open) -> None:
    engine = opened(SOME)
    with engine.conversation() as text, engine.conversation() as ids:
        assert run(text, "The quick brown fox", 4) == run(ids, engine.model.tokenize("The quick brown fox"), 4)


@pytest.mark.parametrize("together", [OFF, SOME])
def test_interleaved_conversations_do_not_disturb_each_other(opened: Open, together: str) -> None:
    engine = opened(together)
    with engine.conversation() as alone:
        expected = [run(alone, PROMPT, 8), run(alone, LONG, 8)]
    with engine.conversation() as one, engine.conversation() as two:
        streams = one.generate(PROMPT, 8, hash_logits=True), two.generate(LONG, 8, hash_logits=True)
        tokens: tuple[list[int], list[int]] = ([], [])
        for a, b in itertools.zip_longest(*streams):
            tokens[0].append(a.id)
            tokens[1].append(b.id)
        assert one.summary is not None
        assert two.summary is not None
        assert expected == [(tokens[0], one.summary.logits_sha256), (tokens[1], two.summary.logits_sha256)]


def test_conversations_in_threads_take_turns(opened: Open) -> None:
    engine = opened(SOME)
    with engine.conversation() as alone:
        expected = [run(alone, prompt, 8) for prompt in (PROMPT, LONG)]
    found: dict[int, tuple[list[int], str | None]] = {}

    def generate(index: int, prompt: list[int]) -> None:
        with engine.conversation() as conversation:
            found[index] = run(conversation, prompt, 8)

    threads = [threading.Thread(target=generate, args=item) for item in enumerate((PROMPT, LONG))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert dict(enumerate(expected)) == found


# ---- cancelling


class AtRead:
    """Calls ``act`` from another thread at the n-th read of the fetcher, and counts the reads after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int, act: Callable[[], None]) -> None:
        self.reads = 0
        real = PreadFetcher.submit

        def submit(fetcher: PreadFetcher, batch: object, /) -> object:
            self.reads += 1
            if self.reads == n:
                thread = threading.Thread(target=act)
                thread.start()
                thread.join()
            return real(fetcher, batch)  # type: ignore[arg-type]

        monkeypatch.setattr(PreadFetcher, "submit", submit)


@pytest.mark.parametrize("where", [1, 4, 6, 9])
def test_cancel_in_a_prompt_ends_within_the_layer(opened: Open, monkeypatch: pytest.MonkeyPatch, where: int) -> None:
    with opened(OFF).conversation() as fresh:
        expected = run(fresh, LONG, 4)
    with opened(OFF).conversation() as conversation:
        reads = AtRead(monkeypatch, where, conversation.cancel)

        assert [] == list(conversation.generate(LONG, 4))

        assert where == reads.reads
        assert "cancelled" == stop_of(conversation)
        assert LONG[: (where - 1) // 4 * 16] == conversation.tokens  # 4 layers: whole ubatches stay
        assert expected == run(conversation, LONG, 4)


@pytest.mark.parametrize("where", [5, 8, 10])
def test_cancel_while_decoding_ends_within_the_layer(opened: Open, monkeypatch: pytest.MonkeyPatch, where: int) -> None:
    with opened(OFF).conversation() as fresh:
        expected = run(fresh, PROMPT, 4)
    with opened(OFF).conversation() as conversation:
        reads = AtRead(monkeypatch, where, conversation.cancel)

        tokens = [token.id for token in conversation.generate(PROMPT, 4)]

        whole = (where - 1) // 4
        assert where == reads.reads
        assert expected[0][:whole] == tokens
        assert ("cancelled", PROMPT + tokens[:-1]) == (stop_of(conversation), conversation.tokens)
        assert conversation.summary is not None
        assert whole == conversation.summary.tokens
        assert expected == run(conversation, PROMPT, 4)


def test_cancel_before_generating_ends_at_once_and_only_once(opened: Open) -> None:
    with opened(SOME).conversation() as conversation:
        conversation.cancel()

        assert [] == list(conversation.generate(PROMPT, 4))
        assert ("cancelled", []) == (stop_of(conversation), conversation.tokens)
        assert 4 == len(list(conversation.generate(PROMPT, 4)))
        assert "length" == stop_of(conversation)


def test_cancel_between_tokens_ends_before_the_next(opened: Open) -> None:
    with opened(SOME).conversation() as conversation:
        tokens = []
        for token in conversation.generate(PROMPT, 8):
            tokens.append(token.id)
            if len(tokens) == 3:
                conversation.cancel()

        assert 3 == len(tokens)
        assert "cancelled" == stop_of(conversation)


def test_cancelling_one_conversation_leaves_another_alone(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(OFF)
    with engine.conversation() as one, engine.conversation() as two:
        expected = run(one, PROMPT, 4)
        AtRead(monkeypatch, 3, two.cancel)  # while the first decodes

        assert expected == run(one, PROMPT, 4)
        assert "length" == stop_of(one)
        assert [] == list(two.generate(PROMPT, 4))


def test_closing_the_generator_early_keeps_what_was_decoded(opened: Open) -> None:
    with opened(SOME).conversation() as conversation:
        expected = run(conversation, PROMPT, 5)
        stream = conversation.generate(PROMPT, 5)
        assert isinstance(stream, Iterator)
        tokens = [next(stream).id, next(stream).id]
        stream.close()  # type: ignore[attr-defined]

        assert expected[0][:2] == tokens
        assert ("cancelled", PROMPT + tokens[:1]) == (stop_of(conversation), conversation.tokens)
        assert conversation.summary is not None
        assert 2 == conversation.summary.tokens
        assert expected == run(conversation, PROMPT, 5)


def test_what_the_caller_raises_between_tokens_is_its_own_business(opened: Open) -> None:
    with opened(SOME).conversation() as conversation:
        stream = conversation.generate(PROMPT, 5)
        next(stream)
        with pytest.raises(ZeroDivisionError):
            stream.throw(ZeroDivisionError)  # type: ignore[attr-defined]
        assert 5 == len(list(conversation.generate(PROMPT, 5)))


# ---- ends


@pytest.mark.parametrize(("n", "stop"), [(0, "length"), (1, "length"), (5, "length")])
def test_a_limit_that_is_reached_is_length(opened: Open, n: int, stop: str) -> None:
    with opened(SOME).conversation() as conversation:
        assert n == len(list(conversation.generate(PROMPT, n)))
        assert stop == stop_of(conversation)
        assert conversation.summary is not None
        assert n == conversation.summary.tokens


def test_the_end_of_the_context_is_named(opened: Open) -> None:
    with opened(SOME, "model.ctx=16").conversation() as conversation:
        tokens = list(conversation.generate(PROMPT, 100))

        assert 16 - len(PROMPT) == len(tokens)
        assert "context" == stop_of(conversation)
        assert 15 == len(conversation.tokens)
        with pytest.raises(ModelError, match="has 1 tokens and the context has room for 0 and an answer"):
            conversation.generate([1], 5, append=True)
        assert 3 == len(list(conversation.generate(PROMPT, 3)))


def with_end_token(model: str, out: Path, token: int) -> str:
    """A copy of the model that ends its texts with ``token``."""
    data = Path(model).read_bytes()
    key = b"tokenizer.ggml.eos_token_id"
    at = data.index(key) + len(key) + 4
    out.write_bytes(data[:at] + token.to_bytes(4, "little") + data[at + 4 :])
    return str(out)


def test_the_end_of_text_stops_and_is_not_given_out(opened: Open, model: str, tmp_path: Path) -> None:
    with opened(SOME).conversation() as conversation:
        tokens, _ = run(conversation, PROMPT, 8)
    index = next(i for i in range(2, 8) if tokens[i] not in tokens[:i])
    path = with_end_token(model, tmp_path / "ends.gguf", tokens[index])

    with opened(SOME, path=path).conversation() as conversation:
        assert tokens[:index] == [token.id for token in conversation.generate(PROMPT, 8)]
        assert "eog" == stop_of(conversation)
        assert PROMPT + tokens[:index] == conversation.tokens
        assert conversation.summary is not None
        assert index == conversation.summary.tokens


# ---- refused


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_decoded(opened: Open) -> None:
    with opened(SOME, "model.ctx=16").conversation() as conversation:
        list(conversation.generate(PROMPT, 2))
        held = list(conversation.tokens)
        for prompt in (LONG, LONG[:16]):
            with pytest.raises(ModelError, match=rf"{len(prompt)} tokens .* room for 15 .* raise model.ctx \(now 16\)"):
                conversation.generate(prompt, 2)
        assert held == conversation.tokens
        assert 1 == len(list(conversation.generate(LONG[:15], 2)))


@pytest.mark.parametrize("tokens", [[512], [-1], [3, 5, 2**31], [0, 10**6]])
def test_unknown_token_ids_are_refused(opened: Open, tokens: list[int]) -> None:
    with opened(SOME).conversation() as conversation, pytest.raises(ModelError, match=r"outside 0\.\.511"):
        conversation.generate(tokens, 2)


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(opened: Open, prompt: str | list[int]) -> None:
    with opened(SOME).conversation() as conversation, pytest.raises(ModelError, match="the prompt is empty"):
        conversation.generate(prompt, 2)


# ---- sampling


def sampled(opened: Open, *overrides: str) -> list[int]:
    with opened(SOME, *overrides).conversation() as conversation:
        return [token.id for token in conversation.generate(PROMPT, 16)]


def test_a_seed_decides_what_is_sampled(opened: Open) -> None:
    hot = ("sampling.temp=5.0", "sampling.top_k=0", "sampling.top_p=1.0", "sampling.min_p=0.0")
    seven = sampled(opened, *hot, "sampling.seed=7")

    assert seven == sampled(opened, *hot, "sampling.seed=7")
    assert seven != sampled(opened, *hot, "sampling.seed=8")
    assert seven != sampled(opened)


def test_a_second_generation_starts_from_the_seed_again(opened: Open) -> None:
    with opened(SOME, "sampling.temp=3.0", "sampling.seed=1").conversation() as conversation:
        assert run(conversation, PROMPT, 10) == run(conversation, PROMPT, 10)


@pytest.mark.parametrize(
    "knob", [("sampling.top_k=1",), ("sampling.top_p=0.000001",), ("sampling.top_k=0", "sampling.min_p=1.0")]
)
def test_each_filter_alone_can_make_sampling_greedy(opened: Open, knob: tuple[str, ...]) -> None:
    greedy = sampled(opened)
    wide = {"sampling.top_k": "0", "sampling.top_p": "1.0", "sampling.min_p": "0.0"}
    wide |= dict(entry.split("=") for entry in knob)

    assert greedy == sampled(opened, "sampling.temp=2.0", "sampling.seed=3", *(f"{k}={v}" for k, v in wide.items()))


def test_greedy_ties_go_to_the_lowest_id(opened: Open) -> None:
    with opened(SOME).conversation() as conversation:
        stream = conversation.generate(PROMPT, 2)
        best = next(stream).id
        logits = conversation._context.logits()
        low = 3 if best != 3 else 4
        logits[low] = logits[best] = logits.max()
        sampler = Sampler(SamplingOptions(), 512)

        assert low == sampler.next(conversation._context)
        sampler.close()
        sampler.close()


def test_a_penalty_changes_greedy_choices(opened: Open) -> None:
    plain = sampled(opened)
    assert len(set(plain)) < len(plain), "the model repeats itself, or this test shows nothing"

    penalised = sampled(opened, "sampling.repeat_penalty=100.0")

    assert len(set(penalised)) > len(set(plain))


# ---- text


def test_characters_split_over_tokens_come_out_whole(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(SOME)
    text = "é€ 😀ßx"
    ids = engine.model.tokenize(text)
    assert len(ids) > len(text), "the tokens must split characters"
    script = iter(ids)
    monkeypatch.setattr(Sampler, "next", lambda sampler, context: next(script))

    with engine.conversation() as conversation:
        tokens: list[Token] = list(conversation.generate(PROMPT, len(ids)))

    assert text == "".join(token.text for token in tokens)
    assert "" in [token.text for token in tokens]
    assert not any("\N{REPLACEMENT CHARACTER}" in token.text for token in tokens)
    assert [token.text for token in tokens] == [token.record.text for token in tokens]


# ---- the account


def test_the_hash_is_over_every_row_that_a_token_was_chosen_from(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256()
    real = Sampler.next

    def noted(sampler: Sampler, context: object) -> int:
        digest.update(context.logits().tobytes())  # type: ignore[attr-defined]
        return real(sampler, context)  # type: ignore[arg-type]

    monkeypatch.setattr(Sampler, "next", noted)
    with opened(SOME).conversation() as conversation:
        _, found = run(conversation, PROMPT, 5)

    assert digest.hexdigest() == found


def test_records_and_summary_add_up(opened: Open) -> None:
    with opened(OFF).conversation() as conversation:
        tokens = list(conversation.generate(LONG, 6))
        summary = conversation.summary
    records = [token.record for token in tokens]
    assert summary is not None

    assert (6, 50, 4 * 2 * 5) == (summary.tokens, summary.prompt_tokens, summary.lookups)
    assert [0, 1, 2, 3, 4, 5] == [record.index for record in records]
    assert summary.bytes_read == sum(record.demand_bytes or 0 for record in records)
    assert summary.prefill_bytes == records[0].demand_bytes
    assert summary.bytes_per_token == (summary.bytes_read - summary.prefill_bytes) / 5
    assert summary.prefill_s == records[0].decode_s
    assert summary.decode_s == pytest.approx(sum(record.decode_s or 0 for record in records[1:]))
    assert (0.0, False, "length") == (summary.hit_rate, summary.lossy, summary.stop)
    assert records[0].between_s is None
    assert all(record.between_s is not None and record.between_s >= 0 for record in records[1:])
    assert summary.logits_sha256 is None


def test_the_hits_of_a_cache_are_those_of_decode_alone(opened: Open) -> None:
    with opened("cache.budget_mb=64").conversation() as conversation:
        list(conversation.generate(LONG, 3))
        list(conversation.generate(LONG, 3))
        summary = conversation.summary
    assert summary is not None

    assert (1.0, 16, 16, 0, 0) == (
        summary.hit_rate,
        summary.lookups,
        summary.hits,
        summary.bytes_read,
        summary.evictions,
    )
