"""Trees of candidates: their shape, the sequences that they are to llama.cpp, and what of a proposal is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.candidates import comb, likeliest
from bmoe.contracts import Proposal
from bmoe.tree import Tree, flaw


@st.composite
def proposals(draw, most=12):
    count = draw(st.integers(0, most))
    tokens = tuple(draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)))
    parent = tuple(draw(st.integers(-1, index - 1)) for index in range(count))
    odds = draw(st.one_of(st.none(), st.lists(st.floats(0, 1), min_size=count, max_size=count).map(tuple)))
    return Proposal(tokens, parent if draw(st.booleans()) else (), odds)


def path_to(tree, index):
    found = []
    while index >= 0:
        found.append(index)
        index = tree.parent[index]
    return found[::-1]


@given(proposals())
def test_a_token_sees_its_path_and_nothing_beside_it(proposal):
    """By the rule of the KV: a token sees the tokens of a smaller depth that share a sequence with it."""
    tree = Tree.of(9, proposal)
    sequences = tree.sequences or ((0,),) * len(tree.tokens)
    for index in range(len(tree.tokens)):
        seen = [
            other
            for other in range(len(tree.tokens))
            if tree.depth[other] <= tree.depth[index] and set(sequences[other]) & set(sequences[index])
        ]
        assert path_to(tree, index) == sorted(seen, key=lambda other: tree.depth[other])


@given(proposals())
def test_each_path_is_one_sequence_and_the_first_is_the_texts_own(proposal):
    tree = Tree.of(9, proposal)
    inner = set(tree.parent)
    leaves = [index for index in range(len(tree.tokens)) if index not in inner]
    assert len(leaves) == tree.paths
    if tree.paths == 1:
        assert not tree.sequences
        return
    assert sorted(tree.sequences[leaf] for leaf in leaves) == [(path,) for path in range(tree.paths)]
    first = 0
    while first in inner:
        first = tree.parent.index(first)
    assert (0,) == tree.sequences[first]
    assert tuple(range(tree.paths)) == tree.sequences[0]


@given(proposals())
def test_depths_and_probabilities_follow_from_parents(proposal):
    tree = Tree.of(9, proposal)
    for index in range(1, len(tree.tokens)):
        assert tree.depth[index] == len(path_to(tree, index)) - 1
        if proposal.probability is not None:
            odds = np.prod([proposal.probability[step - 1] for step in path_to(tree, index)[1:]])
            assert tree.path_probability[index] == pytest.approx(odds)
        child = tree.child(tree.parent[index], tree.tokens[index])
        assert child is not None
        assert (tree.parent[child], tree.tokens[child]) == (tree.parent[index], tree.tokens[index])
    assert tree.child(0, 77) is None
    assert len(tree.path_probability) == (0 if proposal.probability is None else len(tree.tokens))


@given(proposals())
def test_what_is_no_flaw_can_be_a_tree(proposal):
    assert "" == flaw(proposal, 12, 6, trees=True)


FLAWED = [
    (Proposal((1, 2, 3)), "proposes 3 tokens where at most 2 were asked for"),
    (Proposal((1, 6)), "proposes 6, no token of this model (0 to 5)"),
    (Proposal((-1,)), "proposes -1, no token"),
    (Proposal((True,)), "proposes True, no token"),
    (Proposal((1.0,)), "proposes 1.0, no token"),
    (Proposal((1, 2), (-1,)), "gives 1 parents for 2 tokens"),
    (Proposal((1, 2), (-1, 1)), "gives token 1 the parent 1; it must be -1 or come before it"),
    (Proposal((1, 2), (-1, -2)), "gives token 1 the parent -2"),
    (Proposal((1, 2), (-1, None)), "gives token 1 the parent None"),
    (Proposal((1, 2), (-1, -1)), "proposes a tree, which its provider does not say (trees)"),
    (Proposal((1,), (), (1.5,)), "gives probabilities that are not one in 0 to 1 for each token"),
    (Proposal((1,), (), (float("nan"),)), "gives probabilities"),
    (Proposal((1, 2), (), (0.5,)), "gives probabilities"),
]


@pytest.mark.parametrize(("proposal", "said"), FLAWED)
def test_a_flaw_is_named(proposal, said):
    assert said in flaw(proposal, 2, 6, trees=False)


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30), st.integers(1, 8))
def test_the_likeliest_are_those_of_a_softmax(row, count):
    logits = np.array(row, np.float32)
    level = likeliest(logits, count)
    shares = np.exp(logits.astype(np.float64) - logits.max())
    shares /= shares.sum()
    order = sorted(range(len(row)), key=lambda token: (-logits[token], token))[:count]
    assert [logits[token] for token in order] == [logits[token] for token, _ in level]
    assert order[0] == level[0][0] == int(logits.argmax())
    assert [shares[token] for token, _ in level] == pytest.approx([odds for _, odds in level], rel=1e-5)


LEVELS = st.lists(
    st.lists(st.floats(0.01, 1), min_size=1, max_size=4).map(
        lambda odds: tuple((10 * rank + 1, p / sum(odds)) for rank, p in enumerate(sorted(odds, reverse=True)))
    ),
    max_size=6,
)


@given(LEVELS, st.integers(1, 16))
def test_a_comb_keeps_its_spine_and_takes_the_likeliest_leaves(levels, limit):
    proposal = comb(levels, limit)
    assert "" == flaw(proposal, limit, 1000, trees=True)
    spine = min(limit, len(levels))
    assert len(proposal.tokens) == min(limit, sum(len(level) for level in levels[:spine]))
    tree = Tree.of(0, proposal)
    assert max(tree.depth) == spine
    # whatever is left out is no likelier, by its path, than any leaf that is there
    inside, odds, outside = [], 1.0, []
    for depth, level in enumerate(levels[:spine], 1):
        there = {t for t, d in zip(tree.tokens, tree.depth, strict=True) if d == depth}
        for token, probability in level[1:]:
            (inside if token in there else outside).append(odds * probability)
        odds *= level[0][1]
    assert not outside or not inside or max(outside) <= min(inside) + 1e-12
