"""How a generation ends is named, and a prompt that cannot be served is refused before decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from bmoe.errors import ModelError

from .runs import LONG, PROMPT, SOME, Open, run, stop_of


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
