"""Sampling with drafts: the same distribution as without, and with one seed the same text, token for token."""

from __future__ import annotations

import collections
import dataclasses
import math

import numpy as np
import pytest

import bmoe.conversation
import bmoe.decode
from bmoe.contracts import Proposal
from bmoe.engine import Engine
from bmoe.resolve import resolve
from bmoe.testing.models import TinyModels

PROMPT = [11, 48, 85, 122, 159, 196, 11, 48, 85]
TOP, DRAWS = 4, 1500
HOT = {"temp": 1.0, "top_k": TOP, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "seed": 0}
SETTINGS = [
    HOT,
    {**HOT, "temp": 1.5, "top_k": 12, "top_p": 0.8},
    {**HOT, "top_k": 0, "min_p": 0.1},
    {**HOT, "temp": 2.0, "repeat_penalty": 1.4},
    {**HOT, "temp": 0.0, "repeat_penalty": 1.4},
]


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory):
    return TinyModels(tmp_path_factory.mktemp("models")).path("tiny-qwen3moe", "F32")


def opened(path, sampling, drafter=None, **options):
    table = {
        "model": {"path": str(path), "ctx": 64, "ubatch": 16, "threads": 1, "kv_type": "f32"},
        "cache": {"policy": "lru", "budget_mb": 64},
        "sampling": sampling,
    }
    if drafter is not None:
        table["draft"] = {"drafter": drafter, "max_draft": 6, "governor": "fixed", "options": options}
    return Engine(resolve(table))


@pytest.fixture(name="seeds")
def _seeds(monkeypatch):
    """One seed after the other for the generations of one engine, from where the test sets it."""
    seeds = [0]
    real = bmoe.conversation.Sampler

    def seeded(options, n_vocab):
        seeds[0] += 1
        return real(dataclasses.replace(options, seed=seeds[0] - 1), n_vocab)

    monkeypatch.setattr(bmoe.conversation, "Sampler", seeded)
    return seeds


class Table:
    """Two levels of the model's own distribution: what follows the first token, and what follows both."""

    def __init__(self, conversation, first):
        self.first = first
        self.after: dict[tuple[int, ...], dict[int, float]] = {}
        self._fill(conversation, (first,))
        for token in self.after[first,]:
            self._fill(conversation, (first, token))

    def _fill(self, conversation, path):
        conversation.clear()
        conversation.feed([*PROMPT, *path])
        row = conversation.logits().astype(np.float64)
        best = np.argsort(-row)[:TOP]
        odds = np.exp(row[best] - row[best].max())
        self.after[path] = dict(zip(best.tolist(), (odds / odds.sum()).tolist(), strict=True))

    def likeliest(self, path):
        return sorted(self.after[path], key=lambda token: -self.after[path][token])

    def expected(self):
        return {
            (second, third): p * q
            for second, p in self.after[self.first,].items()
            for third, q in self.after[self.first, second].items()
        }


class Chosen:
    """Drafts the two tokens after the first one: the likeliest, the least likely, or both in a tree."""

    def __init__(self, table, kind):
        self.table, self.kind = table, kind
        self.drafted = self.right = 0

    def draft(self, context, limit, /):
        if limit < 6 or len(context) != len(PROMPT) + 1:
            return Proposal(())
        table = self.table
        ends = {"right": (0,), "wrong": (-1,), "tree": (0, 1)}[self.kind]
        tokens, parents = [], []
        for end in ends:
            token = table.likeliest((table.first,))[end]
            tokens += [token, *(table.likeliest((table.first, token))[each] for each in ends)]
            parents += [-1, *[len(parents)] * len(ends)]
        self.drafted += 1
        return Proposal(tuple(tokens), tuple(parents))

    def accepted(self, count, /):
        self.right += count


def deviation(counts, expected):
    """Chi-square of counts against probabilities, in standard deviations of a normal one (Wilson and Hilferty)."""
    total = sum(counts.values())
    rare = {cell for cell, odds in expected.items() if odds * total < 5}
    cells = [(counts[cell], odds * total) for cell, odds in expected.items() if cell not in rare]
    rest = (sum(counts[cell] for cell in rare), sum(expected[cell] for cell in rare) * total)
    cells += [rest] if rest[1] >= 5 else []
    assert len(cells) > 4
    assert sum(counts[cell] for cell in expected) == total  # nothing outside of what can be drawn
    square, free = sum((seen - due) ** 2 / due for seen, due in cells), len(cells) - 1
    return ((square / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


def drawn(path, kind, seeds):
    """How often each pair followed the first token, by one draft that named some of them; and the table of them."""
    engine = opened(path, HOT, "ngram", branching=2)
    counts = collections.Counter()
    with engine, engine.conversation() as conversation:
        conversation.feed(PROMPT)
        table = Table(conversation, int(conversation.logits().argmax()))
        drafter = Chosen(table, kind) if kind else None
        if drafter is None:
            conversation.drafting = None
        else:
            conversation.drafting._drafter = drafter
        seeds[0] = 1000 * len(kind)
        for _ in range(DRAWS):
            conversation.clear()
            conversation.feed(PROMPT[:-1])
            said = [token.id for token in conversation.generate([PROMPT[-1]], 8, append=True)]
            if said[0] == table.first:
                counts[tuple(said[1:3])] += 1
    if drafter is not None:
        assert drafter.drafted > DRAWS / 5
        assert drafter.right > 0
    return counts, table.expected()


@pytest.mark.parametrize("kind", ["", "right", "wrong", "tree"])
def test_the_distribution_is_the_models(path, seeds, kind):
    """Whether what is drafted is likely or not, of one token or of several: so many draws deviate no more than draws.

    Without drafts as well, which shows that the table is right.
    """
    assert abs(deviation(*drawn(path, kind, seeds))) < 3.5


@pytest.mark.parametrize("kind", ["right", "wrong", "tree"])
def test_a_wrong_rule_of_acceptance_is_found(path, seeds, kind, monkeypatch):
    """A drafted token that gets a second chance: the mildest way to accept more than is due."""
    proposed = []
    choose = bmoe.decode._choose

    def twice(context, sampler, digest, row=-1):
        token, end = choose(context, sampler, digest, row)
        drafted = {t for t, parent in zip(proposed[-1].tokens, proposed[-1].parent, strict=True) if parent == row}
        if row >= 0 and drafted and token not in drafted:
            token, end = choose(context, sampler, digest, row)
        return token, end

    def loop(rounds, *rest):
        propose = rounds.propose
        rounds.propose = lambda last, room: proposed.append(propose(last, room)) or proposed[-1]
        try:
            yield from real(rounds, *rest)
        finally:
            del rounds.propose

    real = bmoe.decode.draft_loop
    proposed.append(bmoe.decode.Tree.of(0))
    monkeypatch.setattr(bmoe.decode, "_choose", twice)
    monkeypatch.setattr(bmoe.conversation, "draft_loop", loop)
    assert deviation(*drawn(path, kind, seeds)) > 5


@pytest.fixture(name="rows")
def _rows(monkeypatch):
    """The logits that every token was chosen from, in order."""
    rows = []
    real = bmoe.decode._choose

    def choose(context, sampler, digest, row=-1):
        rows.append(np.array(context.logits(row)))
        return real(context, sampler, digest, row)

    monkeypatch.setattr(bmoe.decode, "_choose", choose)
    return rows


def parted_by_width(text, other):
    """Whether two texts part where the logits of a wider decode rank two tokens the other way round."""
    at = next(at for at, (one, two) in enumerate(zip(text, other, strict=True)) if one[0] != two[0])
    (_, one), (_, two) = text[at], other[at]
    assert np.abs(one - two).max() < 0.01
    return not np.array_equal(np.argsort(-one)[:12], np.argsort(-two)[:12])


@pytest.mark.parametrize("sampling", SETTINGS, ids=range(len(SETTINGS)))
def test_a_seeded_text_is_that_without_drafts(path, seeds, rows, sampling):
    """One draw for each token, whatever is drafted: right and wrong, chains and trees, and every filter."""

    def texts(engine):
        with engine, engine.conversation() as conversation:
            found = []
            for seed in range(6):
                seeds[0] = seed
                rows.clear()
                said = [token.id for token in conversation.generate(PROMPT, 24)]
                found.append(list(zip(said, rows, strict=True)))
            return found, conversation.summary.accepted

    plain, _ = texts(opened(path, sampling))
    ids = [[token for token, _ in text] for text in plain]
    assert (len(set(map(tuple, ids))) > 1) == (sampling["temp"] > 0)
    right = [*PROMPT, *ids[-1]]
    ways = [("oracle", {"text": right, "acceptance": odds}) for odds in (0.0, 0.6, 1.0)]
    ways += [("oracle", {"text": right, "acceptance": 0.6, "branching": 3}), ("ngram", {"min_match": 1})]
    for name, options in ways:
        found, accepted = texts(opened(path, sampling, name, **options))
        other = [at for at, text in enumerate(found) if [token for token, _ in text] != ids[at]]
        assert len(other) <= 1
        assert all(parted_by_width(plain[at], found[at]) for at in other)
        assert accepted or name == "ngram" or not options["acceptance"]
