"""Generating again, continuing and taking turns give what a fresh run gives."""

from __future__ import annotations

import itertools
import threading

import pytest

from .runs import LONG, OFF, PROMPT, SOME, Open, run


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
