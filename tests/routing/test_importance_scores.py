"""The text of a prompt is laid out by characters, and a scorer's answer is checked and scaled before anything runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bmoe
from bmoe.errors import PluginError
from bmoe.importance import laid_out
from bmoe.testing.models import TinyModels

ALIKE = settings(max_examples=300, derandomize=True, database=None, deadline=None)


class Says:
    """A scorer with a fixed answer, which notes what it was asked."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def score(self, prompt, text, spans, /):
        self.asked.append((list(prompt), text, spans))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(prompt) if callable(self.answer) else self.answer


@pytest.fixture(name="engine", scope="module")
def _engine(tmp_path_factory):
    path = str(TinyModels(tmp_path_factory.mktemp("models")).path("tiny-qwen3moe"))
    table = {
        "model": {"path": path, "threads": 1, "ctx": 128, "ubatch": 16},
        "fetch": {"plugin": "pread"},
        "routing": [{"plugin": "edgexpert-prefill", "options": {"importance": "uniform"}}],
    }
    with bmoe.open(table) as engine:
        yield engine


def scored(engine, answer, prompt=(5, 6, 7)):
    before, engine.hot = engine.hot, replace(engine.hot, importance=Says(answer))
    try:
        return engine.importance(prompt)
    finally:
        engine.hot = before


def test_spans_are_of_characters():
    text, spans = laid_out([b"", b"caf", "é ".encode(), "€".encode()[:1], "€".encode()[1:], b"!", b""])

    assert text == "café €!"
    assert spans == [(0, 0), (0, 3), (3, 5), (5, 6), (5, 6), (6, 7), (7, 7)]


def test_a_byte_that_is_no_text_is_one_character():
    assert laid_out([b"a\xff", b"\xe2\x82", b"b"]) == ("a\ufffd\ufffd\ufffdb", [(0, 2), (2, 4), (4, 5)])
    assert laid_out(["\ufffd".encode(), b"b"]) == ("\ufffdb", [(0, 1), (1, 2)])


@given(st.lists(st.binary(max_size=5), max_size=8))
@ALIKE
def test_spans_cover_any_bytes_in_order(pieces):
    text, spans = laid_out(pieces)

    assert len(spans) == len(pieces)
    assert all(bool(piece) == (begin < end) for piece, (begin, end) in zip(pieces, spans, strict=True))
    assert all(0 <= begin <= end <= len(text) for begin, end in spans)
    assert {at for begin, end in spans for at in range(begin, end)} == set(range(len(text)))
    begins = [begin for begin, end in spans]
    assert begins == sorted(begins)
    text.encode()


@given(st.text(max_size=20), st.integers(1, 4))
@ALIKE
def test_text_that_is_cut_anywhere_is_itself(text, width):
    data = text.encode(errors="replace")
    shown, _ = laid_out([data[at : at + width] for at in range(0, len(data), width)])

    assert shown == data.decode()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([1, 4, 2], (0.25, 1.0, 0.5)),
        ([math.inf, 4, 2], (math.inf, 1.0, 0.5)),
        ([0, 0, 0], (1.0, 1.0, 1.0)),
        ([math.inf, 0, 0], (math.inf, 1.0, 1.0)),
        ([math.inf] * 3, (math.inf,) * 3),
        ([1e300, 5e299, 0], (1.0, 0.5, 0.0)),
    ],
)
def test_the_greatest_finite_score_becomes_1(engine, answer, expected):
    assert scored(engine, answer) == expected


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1, 2], "gives 2 scores for 3 tokens; correct the plugin"),
        ([1, math.nan, 2], "gives token 1 the score nan; correct the plugin: 0 or more"),
        ([1, 2, -0.5], "gives token 2 the score -0.5; correct the plugin: 0 or more"),
        (None, "cannot score this prompt; choose another, or correct it (TypeError"),
        (["a", 1, 2], "cannot score this prompt; choose another, or correct it (ValueError"),
        ([10**400, 1, 2], "cannot score this prompt; choose another, or correct it (OverflowError"),
        (ZeroDivisionError("so\nand so"), "cannot score this prompt; choose another, or correct it (ZeroDivisionError"),
    ],
)
def test_a_scorer_that_fails_is_named_in_one_line(engine, answer, said):
    with pytest.raises(PluginError) as caught:
        scored(engine, answer)

    assert str(caught.value).startswith(f'profile: routing.0.options.importance = "uniform" {said}')
    assert "\n" not in str(caught.value)


def test_an_option_that_is_to_blame_is_named(engine):
    with pytest.raises(PluginError) as caught:
        scored(engine, PluginError("options.sharp = 2 is too much; give 1"))
    assert str(caught.value) == "profile: routing.0.options.importance_options.sharp = 2 is too much; give 1"


def test_a_scorer_is_asked_once_a_prompt_with_its_text(engine):
    says = Says(lambda prompt: [1.0] * len(prompt))
    before, engine.hot = engine.hot, replace(engine.hot, importance=says)
    try:
        prompt = engine.model.tokenize("the sea and the wind " * 4)
        with engine.conversation() as one:
            list(one.generate(prompt, 3))
            one.feed(prompt[:2])
            one.feed([3], "decode")
    finally:
        engine.hot = before

    assert [tokens for tokens, _, _ in says.asked] == [prompt, prompt[:2]]
    text = says.asked[0][1]
    assert text.strip().startswith("the sea and the wind")
    assert "".join(text[begin:end] for begin, end in says.asked[0][2]) == text


def test_what_scoring_takes_counts_as_time_of_the_prompt(engine):
    import time

    def slow(prompt):
        time.sleep(0.2)
        return [1.0] * len(prompt)

    before, engine.hot = engine.hot, replace(engine.hot, importance=Says(slow))
    try:
        with engine.conversation() as one:
            list(one.generate([5, 6, 7], 1))
            assert one.summary.prefill_s >= 0.2
            assert one.feed([5, 6, 7]).decode_s >= 0.2
    finally:
        engine.hot = before
