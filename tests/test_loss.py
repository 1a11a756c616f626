"""The loss budget: a bound for every token, spent where it saves most reads per mass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.loss import Ledger, Turned, draw, mass_lost

EXPERTS, USED = 8, 3


def routing(seed: int, tokens: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The model's own choice, the router's probabilities, and which experts are missing."""
    numbers = np.random.default_rng(seed)
    probs = numbers.dirichlet(np.ones(EXPERTS), tokens).astype(np.float32)
    own = np.argsort(-probs, axis=1, kind="stable")[:, :USED].astype(np.int32)
    return own, probs, numbers.random(EXPERTS) < 0.5


def proposal(own: np.ndarray, probs: np.ndarray, seed: int) -> Turned:
    """A policy that leaves some slots out and gives others to experts that the token does not use."""
    numbers = np.random.default_rng(seed)
    ids, dead, mute = own.copy(), np.zeros(own.shape, bool), np.zeros(own.shape, bool)
    for token, row in enumerate(own):
        others = [e for e in np.argsort(-probs[token]) if e not in row]
        for slot in range(1, USED):
            what = numbers.integers(4)
            if what == 0:
                dead[token, slot] = True
            elif what == 1:
                mute[token, slot] = True
            elif what == 2:
                ids[token, slot] = others.pop(0)
    return Turned(ids, dead, mute)


def whole(own: np.ndarray, probs: np.ndarray) -> np.ndarray:
    return np.take_along_axis(probs, own, 1).astype(np.float64).sum(axis=1)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), policies=st.integers(1, 3), budget=st.floats(0.0, 1.0))
def test_no_token_loses_more_than_it_may(seed, policies, budget):
    own, probs, missing = routing(seed)
    proposals = [proposal(own, probs, seed + index) for index in range(policies)]

    turned = draw(own, proposals, probs, missing, np.full(len(own), budget))

    assert (mass_lost(whole(own, probs), turned, probs) <= budget + 1e-6).all()
    out = turned.dead | turned.mute
    assert not out.all(axis=1).any()
    for ids, gone in zip(turned.ids.tolist(), out.tolist(), strict=True):
        live = [e for e, away in zip(ids, gone, strict=True) if not away]
        assert len(set(live)) == len(live)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_only_what_saves_a_read_is_taken(seed):
    own, probs, missing = routing(seed)

    turned = draw(own, [proposal(own, probs, seed)], probs, missing, np.full(len(own), 1.0))

    changed = (turned.ids != own) | turned.dead | turned.mute
    assert missing[own[changed]].all(), "an expert was given up that is in memory"
    moved = (turned.ids != own) & ~turned.dead & ~turned.mute
    costs = missing.copy()
    costs[own.ravel()] = False  # read in any case
    assert not costs[turned.ids[moved]].any(), "an expert was taken that has to be read for it"


def test_the_cheapest_goes_first_and_the_rest_stays():
    probs = np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)
    own = np.array([[0, 1, 2]], np.int32)
    everything = Turned(own.copy(), np.array([[False, True, True]]), np.zeros((1, 3), bool))

    turned = draw(own, [everything], probs, np.ones(4, bool), np.array([0.2]))

    assert [[False, False, True]] == turned.dead.tolist()


def test_of_two_policies_that_want_a_slot_the_cheaper_has_it():
    probs = np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)
    own = np.array([[0, 1, 2]], np.int32)
    leaves_out = Turned(own.copy(), np.array([[False, False, True]]), np.zeros((1, 3), bool))
    substitutes = Turned(np.array([[0, 1, 3]], np.int32), np.zeros((1, 3), bool), np.zeros((1, 3), bool))

    turned = draw(own, [leaves_out, substitutes], probs, np.array([True, True, True, False]), np.array([1.0]))

    assert [[0, 1, 3]] == turned.ids.tolist()
    assert not turned.dead.any()


def test_what_a_batch_needs_anyway_is_worth_less():
    """Both tokens use expert 2; only one of them may give it up, which saves nothing alone, so expert 3 goes first."""
    probs = np.array([[0.5, 0.0, 0.3, 0.2], [0.5, 0.3, 0.2, 0.0]], np.float32)
    own = np.array([[0, 2, 3], [0, 1, 2]], np.int32)
    all_but_best = Turned(own.copy(), np.array([[False, True, True]] * 2), np.zeros((2, 3), bool))

    turned = draw(own, [all_but_best], probs, np.ones(4, bool), np.array([0.3, 0.3]))

    assert [False, False, True] == turned.dead[0].tolist()


def test_what_another_token_needs_costs_no_read():
    """A shortlist for a batch: the expert that takes the slot has to be read, but for the other token in any case."""
    probs = np.array([[0.6, 0.25, 0.15, 0.0], [0.0, 0.0, 0.6, 0.4]], np.float32)
    own = np.array([[0, 1], [2, 3]], np.int32)
    listed = Turned(np.array([[0, 2], [2, 3]], np.int32), np.zeros((2, 2), bool), np.zeros((2, 2), bool))

    turned = draw(own, [listed], probs, np.ones(4, bool), np.array([1.0, 1.0]))

    assert [[0, 2], [2, 3]] == turned.ids.tolist()


def test_a_ledger_lets_a_token_spend_what_it_saved():
    ledger = Ledger(2)
    ledger.lost([0, 1], np.array([0.0, 0.02]))

    assert [0.04, 0.02] == pytest.approx(ledger.allowed([0, 1], 0.02).tolist())
    ledger.lost([1], np.array([0.02]))
    assert [0.0, 0.02] == pytest.approx(ledger.means.tolist())
