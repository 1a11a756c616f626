"""A cancelled generation ends within the layer, and the conversation goes on as if fresh."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from bmoe_plugins.fetch.pread import PreadFetcher

from .runs import LONG, OFF, PROMPT, SOME, Open, run, stop_of

SERIAL = "stream.overlap=off"


class AtRead:
    """Calls ``act`` from another thread at the n-th read of the fetcher, and counts the reads after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int, act: Callable[[], None]) -> None:
        self.reads = 0
        real = PreadFetcher.submit

        def submit(fetcher: PreadFetcher, batch: object, /, **options: bool) -> object:
            self.reads += 1
            if self.reads == n:
                thread = threading.Thread(target=act)
                thread.start()
                thread.join()
            return real(fetcher, batch, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(PreadFetcher, "submit", submit)


@pytest.mark.parametrize("where", [1, 4, 6, 9])
def test_cancel_in_a_prompt_ends_within_the_layer(opened: Open, monkeypatch: pytest.MonkeyPatch, where: int) -> None:
    with opened(OFF, SERIAL).conversation() as fresh:
        expected = run(fresh, LONG, 4)
    with opened(OFF, SERIAL).conversation() as conversation:
        reads = AtRead(monkeypatch, where, conversation.cancel)

        assert [] == list(conversation.generate(LONG, 4))

        assert where == reads.reads
        assert "cancelled" == stop_of(conversation)
        assert LONG[: (where - 1) // 4 * 16] == conversation.tokens  # 4 layers: whole ubatches stay
        assert expected == run(conversation, LONG, 4)


@pytest.mark.parametrize("where", [5, 8, 10])
def test_cancel_while_decoding_ends_within_the_layer(opened: Open, monkeypatch: pytest.MonkeyPatch, where: int) -> None:
    with opened(OFF, SERIAL).conversation() as fresh:
        expected = run(fresh, PROMPT, 4)
    with opened(OFF, SERIAL).conversation() as conversation:
        reads = AtRead(monkeypatch, where, conversation.cancel)

        tokens = [token.id for token in conversation.generate(PROMPT, 4)]

        whole = (where - 1) // 4
        assert where == reads.reads
        assert expected[0][:whole] == tokens
        assert ("cancelled", PROMPT + tokens[:-1]) == (stop_of(conversation), conversation.tokens)
        assert conversation.summary is not None
        assert whole == conversation.summary.tokens
        assert expected == run(conversation, PROMPT, 4)


@pytest.mark.parametrize("overlap", ["projection", "off"])
@pytest.mark.parametrize("budget", [OFF, SOME])
@pytest.mark.parametrize("where", [1, 2, 3, 5, 8, 13, 21])
def test_cancel_while_later_reads_are_out_leaves_none_of_them_in_flight(
    opened: Open, monkeypatch: pytest.MonkeyPatch, overlap: str, budget: str, where: int
) -> None:
    settings = (budget, f"stream.overlap={overlap}")
    with opened(*settings).conversation() as fresh:
        expected = run(fresh, LONG, 6)
    engine = opened(*settings)
    with engine.conversation() as conversation:
        AtRead(monkeypatch, where, conversation.cancel)

        tokens = [token.id for token in conversation.generate(LONG, 6)]

        assert "cancelled" == stop_of(conversation)
        assert expected[0][: len(tokens)] == tokens
        assert {} == engine.hot.fetcher._flights, "reads into memory that is somebody else's by now"
        monkeypatch.undo()
        assert expected == run(conversation, LONG, 6)


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
