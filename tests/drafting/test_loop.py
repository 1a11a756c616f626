"""The loop of draft and verification over a model that is a table: whatever is drafted, the text is the model's own."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.contracts import Proposal
from bmoe.costs import DecodeCost
from bmoe.decode import Draft, draft_loop, token_loop
from bmoe.tree import Tree

N_VOCAB, END = 7, 6


class Table:
    """A model whose next token is a function of the text so far, and the context over it."""

    def __init__(self, seed, ends=False):
        self.seed, self.ends = seed, ends
        self.text, self.rows = [0], [self.row([0])]
        self.model = self

    def row(self, text):
        draw = np.random.default_rng([self.seed, *text])
        row = draw.standard_normal(N_VOCAB).astype(np.float32)
        row[END] = row.max() + 1 if self.ends and len(text) > 9 else -9
        return row

    def is_end(self, token):
        return token == END

    def logits(self, row=-1):
        return self.rows[row]

    def next(self, context, row=-1):
        return int(self.logits(row).argmax())


class Drafted:
    """Rounds with proposals from a list, checked on the way."""

    def __init__(self, table, proposals):
        self.table, self.proposals = table, list(proposals)
        self.trees, self.kept, self.unsaid, self.decodes = [], [], 0, 0

    def propose(self, last, room):
        proposal = self.proposals.pop(0) if self.proposals else Proposal(())
        tokens = tuple(token % (N_VOCAB - 1) for token in proposal.tokens[:room])
        self.trees.append(Tree.of(last, Proposal(tokens, proposal.parent[:room])))
        return self.trees[-1]

    def verify(self, tree):
        self.decodes += 1
        paths = []
        for index, token in enumerate(tree.tokens):
            above = paths[tree.parent[index]] if index else self.table.text
            paths.append([*above, token])
        self.table.rows = [self.table.row(path) for path in paths]
        return DecodeCost(1, 0.5)

    def keep(self, tree, kept, cost):
        assert tree.parent[kept[0]] == -1
        assert all(tree.parent[b] == a for a, b in pairwise(kept))
        self.table.text += [tree.tokens[index] for index in kept]
        self.kept.append(len(kept))
        return Draft(tree.drafted, len(kept) - 1, max(tree.depth))

    def unsay(self, count):
        self.unsaid += count
        if count:
            del self.table.text[-count:]


def plain(seed, limit, ends):
    table, digest = Table(seed, ends), hashlib.sha256()

    def decode(tokens, phase):
        table.text += tokens
        table.rows = [table.row(table.text)]
        return DecodeCost(1)

    steps = list(token_loop(decode, table, table, DecodeCost(), limit, digest))
    return [step.token for step in steps], table.text, digest.hexdigest()


@st.composite
def drafts(draw):
    """Proposals that know some of the text, in chains and trees."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        count = draw(st.integers(0, 5))
        parent = tuple(draw(st.integers(-1, index - 1)) for index in range(count))
        tokens = tuple(draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)))
        found.append(Proposal(tokens, parent if draw(st.booleans()) else ()))
    return found


@given(st.integers(0, 50), st.integers(1, 14), st.booleans(), drafts())
def test_the_text_is_that_without_drafts(seed, limit, ends, proposals):
    said, text, rows = plain(seed, limit, ends)
    table, digest = Table(seed, ends), hashlib.sha256()
    rounds = Drafted(table, proposals)

    steps = list(draft_loop(rounds, table, table, DecodeCost(), limit, digest))

    assert said == [step.token for step in steps]
    assert rows == digest.hexdigest()
    assert text == table.text  # and so the KV holds what it would have held
    assert [False] * (len(steps) - 1) == [step.is_end for step in steps[:-1]]
    assert steps[-1].is_end == (said[-1] == END)
    assert 1 + sum(rounds.kept) == len(said)  # a round gives what was accepted and one more
    assert rounds.decodes == sum(step.cost.decodes for step in steps)
    assert sum(step.draft is not None for step in steps) == rounds.decodes
    assert rounds.unsaid == 0
    assert all(tree.drafted <= limit for tree in rounds.trees)


@given(st.integers(0, 20), st.integers(1, 12), drafts())
def test_one_who_stops_asking_leaves_the_text_as_without_drafts(seed, stop, proposals):
    said, text, _ = plain(seed, stop, ends=False)
    table = Table(seed)
    steps = draft_loop(Drafted(table, proposals), table, table, DecodeCost(), 40, None)

    assert said == [next(steps).token for _ in range(stop)]
    steps.close()

    assert text == table.text


def test_right_drafts_save_decodes():
    said, _, _ = plain(3, 13, ends=False)
    table = Table(3)
    rounds = Drafted(table, [Proposal(tuple(said[1:4])), Proposal(tuple(said[5:8])), Proposal(tuple(said[9:12]))])

    list(draft_loop(rounds, table, table, DecodeCost(), 13, None))

    assert ([4, 4, 4], 3) == (rounds.kept, rounds.decodes)


def test_a_drafted_end_ends_the_text():
    """What the model says is the end is not a part of the text, and nothing after it is."""
    said, _, _ = plain(3, 40, ends=True)
    table = Table(3, ends=True)
    rounds = Drafted(table, [Proposal(())] * (len(said) - 4) + [Proposal((*said[-3:], 0, 0))])
    rounds.propose = lambda last, room: Tree.of(last, rounds.proposals.pop(0))

    steps = list(draft_loop(rounds, table, table, DecodeCost(), 40, None))

    assert (said, END) == ([step.token for step in steps], steps[-1].token)
    assert 3 == rounds.kept[-1]


def test_costs_come_once():
    """The first token of a round has its cost; the others cost nothing, as far as it is measured at all."""
    said, _, _ = plain(3, 5, ends=False)
    table = Table(3)
    rounds = Drafted(table, [Proposal(tuple(said[1:4]))])
    rounds.verify = lambda tree: (Drafted.verify(rounds, tree), DecodeCost(1, 0.5, read_bytes=8))[1]

    steps = list(draft_loop(rounds, table, table, DecodeCost(9), 5, None))

    assert [9, 1, 0, 0, 0] == [step.cost.decodes for step in steps]
    assert [None, 8, 0, 0, 0] == [step.cost.read_bytes for step in steps]
    assert {None} == {step.cost.lookups for step in steps}
    assert [None, 3, None, None, None] == [step.draft.accepted if step.draft else None for step in steps]


@pytest.mark.parametrize("limit", [1, 2])
def test_what_nobody_wants_is_not_drafted(limit):
    table = Table(1)
    rounds = Drafted(table, [Proposal((1, 2, 3))] * 3)
    list(draft_loop(rounds, table, table, DecodeCost(), limit, None))
    assert limit - 1 == rounds.decodes == len(rounds.trees)
    assert all(not tree.drafted for tree in rounds.trees)
