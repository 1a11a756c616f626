"""How an item of each format is scored: which tokens are decoded, and what becomes of the logits after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from bmoe.evaluate.datasets import Choice, Item, Problem, Text
from bmoe.evaluate.grading import NEXT_QUESTION, final_number, reply_of
from bmoe.evaluate.metrics import common_prefix
from bmoe.evaluate.prompts import Prompts
from bmoe.evaluate.scorer import Scorer, Tally

Reply = dict[str, Any]


class Skipped(Exception):  # noqa: N818 - no defect: the item is counted and named
    """An item cannot be scored; says why."""


class Vocabulary(Protocol):
    """The part of a model that turns text into tokens and back."""

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""

    def is_end(self, token: int) -> bool:
        """Whether a token ends a generation."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the items of a run share: the vocabulary, the context, the form of prompts, the most tokens of a reply."""

    vocabulary: Vocabulary
    ctx: int
    prompts: Prompts
    tokens: int


def score(item: Item, setting: Setting, scorer: Scorer) -> Reply:
    """The reply to one item: its ``score`` and what shows how it came about. Raises :class:`Skipped`."""
    scorer.begin()
    if isinstance(item, Text):
        return _text(item, setting, scorer)
    return _choice(item, setting, scorer) if isinstance(item, Choice) else _problem(item, setting, scorer)


def _text(item: Text, setting: Setting, scorer: Scorer) -> Reply:
    """Every token but the first, each after those before it.

    A document that is longer than the context is taken in windows that follow each other: each begins with an empty
    context and the last token of the one before, so that every token is scored exactly once.
    """
    ids = setting.vocabulary.tokenize(item.text)
    if len(ids) < 2:
        raise Skipped("it has no token after the first, which is context only")
    tally, windows = Tally(), range(0, len(ids) - 1, setting.ctx)
    for start in windows:
        scorer.clear()
        for token, following in pairwise(ids[start : start + setting.ctx + 1]):
            position = scorer.step(token)
            tally.target(position, following)
            tally.compare(position)
    nll = sum(tally.nlls)
    scores = {"nll": nll, "tokens": len(tally.nlls), **tally.scores()}
    if tally.compared:
        scores["nll_delta"] = nll - tally.reference_nll
    return {"score": scores, "windows": len(windows), "ids": ids, "nlls": tally.nlls}


def _choice(item: Choice, setting: Setting, scorer: Scorer) -> Reply:
    """The log-likelihood of each choice's tokens after what all choices have in common, which is the question."""
    prompt = setting.prompts.ask(item.question)
    texts = [prompt + setting.prompts.joint + choice for choice in item.choices]
    rows = [setting.vocabulary.tokenize(text) for text in texts]
    asked = min(common_prefix([setting.vocabulary.tokenize(prompt), *rows]), *(len(row) - 1 for row in rows))
    if asked < 1:
        raise Skipped("its choices have no token of the question in common")
    longest = max(len(row) for row in rows) - 1
    if longest > setting.ctx:
        raise Skipped(f"it needs {longest} tokens and the context has {setting.ctx}; raise model.ctx")
    question, tally = scorer.prompt(rows[0][:asked]), Tally()
    tally.compare(question)
    likelihoods = []
    for row in rows:
        scorer.rewind(asked)
        position, nll = question, tally.target(question, row[asked])
        for token, following in pairwise(row[asked:]):
            position = scorer.step(token)
            tally.compare(position)
            nll += tally.target(position, following)
        likelihoods.append(-nll)
    normed = [value / len(choice.encode()) for value, choice in zip(likelihoods, item.choices, strict=True)]
    picked, picked_norm = _first_best(likelihoods), _first_best(normed)
    return {
        "score": {
            "right": int(picked == item.answer),
            "right_norm": int(picked_norm == item.answer),
            **tally.scores(),
        },
        "answer": item.answer,
        "picked": picked,
        "picked_norm": picked_norm,
        "text": item.choices[picked],
        "log_likelihoods": likelihoods,
        "prompt_tokens": asked,
        "ids": [row[asked:] for row in rows],
    }


def _problem(item: Problem, setting: Setting, scorer: Scorer) -> Reply:
    """What the model writes, always choosing the likeliest token, and the number that it ends in."""
    vocabulary = setting.vocabulary
    prompt = vocabulary.tokenize(setting.prompts.ask(item.question))
    room = setting.ctx - len(prompt)
    if room < 1:
        raise Skipped(f"it has {len(prompt)} tokens and the context has {setting.ctx}; raise model.ctx")
    if not prompt:
        raise Skipped("its prompt is empty")
    limit, ids, written, tally = min(setting.tokens, room), list[int](), b"", Tally()
    stop = "length" if limit == setting.tokens else "context"
    position = scorer.prompt(prompt)
    while True:
        tally.compare(position)
        token = position.best
        if vocabulary.is_end(token):
            stop = "eog"
            break
        ids.append(token)
        written += vocabulary.piece(token)
        if NEXT_QUESTION.encode() in written:
            stop = "question"
            break
        if len(ids) == limit:
            break
        position = scorer.step(token)
    text = reply_of(written.decode("utf-8", "replace"))
    found = final_number(text)
    return {
        "score": {"right": int(found == item.answer), **tally.scores()},
        "answer": str(item.answer),
        "found": None if found is None else str(found),
        "text": text,
        "stop": stop,
        "prompt_tokens": len(prompt),
        "ids": ids,
    }


def _first_best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
