"""Reuse of experts within a prompt: equal to a plain form of the rule, and never more experts than plain truncation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from bmoe.contracts import BatchContext, Routing
from bmoe_plugins.routing.edgexpert_prefill import EdgexpertOptions, EdgexpertPrefill, sizes

EXPERTS, USED = 12, 4
SPEC = {"major": [4, 4], "minor": [6, 3], "trivial": [8, 2]}
ALIKE = settings(max_examples=200, derandomize=True, database=None, deadline=None)


def oracle_route(rank, grouped, spec, shared=None):
    """The rule in its plain form, after ``prefill_route`` of the oracles that came with the project's research."""
    taken, out = set(shared or ()), [None] * len(rank)
    for group in (0, 1, 2):
        k, n = spec[group]
        for token in (t for t in range(len(rank)) if grouped[t] == group):
            cand = list(rank[token][:k])
            if group == 0:
                pick = cand[:n]
            else:
                pick = cand[:1]
                pick += [e for e in cand[1:] if e in taken][: n - 1]
                pick += [e for e in cand[1:] if e not in pick][: n - len(pick)]
            out[token] = sorted(pick, key=list(rank[token]).index)
            taken |= set(pick)
    return out, taken


def oracle_groups(scores, high, low):
    """After ``groups`` of the same oracles: thresholds are relative to the greatest finite score."""
    top = max((s for s in scores if math.isfinite(s)), default=0.0)
    return [0 if not math.isfinite(s) or s >= high * top else 1 if s >= low * top else 2 for s in scores]


def routing_of(rank, importance=(), *, layer=0, ubatch=0, request="", outputs=(), used=USED):
    """A routing of tokens that rank all experts so."""
    ranking = np.array(rank, np.int32).reshape(len(rank), -1)
    n_expert = ranking.shape[1]
    probs = np.empty(ranking.shape, np.float32)
    np.put_along_axis(probs, ranking, np.linspace(1, 0.1, n_expert, dtype=np.float32)[None, :], 1)
    ids = ranking[:, :used].copy()
    batch = BatchContext(
        "prefill", tuple(range(len(rank))), importance=tuple(importance), is_output=outputs, ubatch=ubatch,
        request_id=request,
    )  # fmt: skip
    shape, resident = ids.shape, np.zeros(n_expert, bool)
    dead, mute, shares = np.zeros(shape, bool), np.zeros(shape, bool), np.full(shape, 1 / used, np.float32)
    return Routing(layer, 0, n_expert, batch, ids, dead, mute, shares, probs, probs, ranking, resident)


def chosen(routing):
    """The experts of each token that take part, as the router ranks them."""
    live = [row[~out].tolist() for row, out in zip(routing.ids, routing.dead | routing.mute, strict=True)]
    return [sorted(ids, key=ranked.tolist().index) for ids, ranked in zip(live, routing.ranking, strict=True)]


def policy_of(**options):
    return EdgexpertPrefill(EdgexpertOptions(**{"importance": "uniform", **SPEC, **options}))


PROMPTS = st.lists(
    st.tuples(st.permutations(range(EXPERTS)), st.sampled_from([0.0, 0.1, 0.35, 0.5, 0.75, 0.9, 1.0, math.inf])),
    min_size=1,
    max_size=12,
)


@given(PROMPTS, PROMPTS)
@ALIKE
def test_it_is_the_published_rule(first, second):
    policy, shared = policy_of(), None
    for ubatch, part in enumerate((first, second)):
        rank, scores = [list(r) for r, _ in part], [s for _, s in part]
        # the core hands over scores of which the greatest finite one of the prompt is 1
        top = max((s for s in scores if math.isfinite(s)), default=0.0) or 1.0
        routing = routing_of(rank, [s / top if math.isfinite(s) else s for s in scores], ubatch=ubatch)
        grouped = oracle_groups([s / top for s in scores], 0.75, 0.35)
        if all(s in (0.0, math.inf) for s in scores):
            grouped = [0 if s else 2 for s in scores]
        spec = [(4, 4), (6, 3), (8, 2)]
        expected, shared = oracle_route(rank, grouped, spec, shared)

        policy.apply(routing)

        assert chosen(routing) == expected


@given(PROMPTS)
@ALIKE
def test_no_more_experts_than_if_each_token_kept_its_best(prompt):
    rank, scores = [list(r) for r, _ in prompt], [s for _, s in prompt]
    routing = routing_of(rank, scores)

    policy_of().apply(routing)

    kept = {0: 4, 1: 3, 2: 2}
    grouped = [0 if s >= 0.75 else 1 if s >= 0.35 else 2 for s in scores]
    plain = {e for ranked, group in zip(rank, grouped, strict=True) for e in ranked[: kept[group]]}
    used = [set(ids) for ids in chosen(routing)]
    assert set().union(*used) <= plain
    assert all(
        len(ids) == kept[group] and ranked[0] in ids
        for ids, group, ranked in zip(used, grouped, rank, strict=True)
    )  # fmt: skip


def test_the_published_example():
    """A, C and D are taken; of B, A, E, C, D, F with n = 3 a token takes B, A and C, where plainly it were B, A, E."""
    a, b, c, d, e, f = range(6)
    routing = routing_of([[a, c, d, b, e, f], [b, a, e, c, d, f]], [1.0, 0.5], used=3)

    policy_of(major=[3, 3], minor=[6, 3]).apply(routing)

    assert chosen(routing)[1] == [b, a, c]


def test_what_stays_keeps_its_slot_and_what_is_over_is_dead():
    routing = routing_of([[0, 1, 2, 3, 4, 5], [0, 4, 1, 5, 2, 3]], [1.0, 0.0])

    policy_of().apply(routing)

    assert routing.ids[1].tolist() == [0, 4, 1, 5]
    assert routing.dead.tolist() == [[False] * 4, [False, True, False, True]]


def test_the_set_lasts_for_a_prompt_or_for_a_ubatch():
    """The second part of a prompt takes over what the first one took, unless the scope is a ubatch."""
    one, two = [[5, 6, 7, 8, 9, 0, 1, 2, 3, 4]], [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
    seen = {}
    for scope in ("prompt", "ubatch"):
        policy = policy_of(scope=scope)
        policy.apply(routing_of(one, [1.0]))
        part = routing_of(two, [0.0], ubatch=1)
        policy.apply(part)
        fresh = routing_of(two, [0.0], ubatch=0)
        policy.apply(fresh)
        seen[scope] = chosen(part), chosen(fresh)

    assert seen == {"prompt": ([[0, 5]], [[0, 1]]), "ubatch": ([[0, 1]], [[0, 1]])}


def test_layers_and_prompts_have_sets_of_their_own():
    """Two conversations take turns; neither they nor two layers hand anything over."""
    one, two = [[5, 6, 7, 8, 9, 0, 1, 2, 3, 4]], [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
    policy = policy_of()
    policy.apply(routing_of(one, [1.0], request="a"))
    parts = [
        routing_of(two, [0.0], request="a", layer=1, ubatch=1),
        routing_of(two, [0.0], request="b", ubatch=1),
        routing_of(two, [0.0], request="a", ubatch=1),
    ]
    for part in parts:
        policy.apply(part)

    assert [chosen(part) for part in parts] == [[[0, 1]], [[0, 1]], [[0, 5]]]


def test_a_token_whose_logits_are_asked_for_is_major():
    rank = [[0, 1, 2, 3, 4, 5]] * 2
    routing = routing_of(rank, [0.0, 0.0], outputs=(False, True))

    policy_of().apply(routing)

    assert [len(ids) for ids in chosen(routing)] == [2, 4]


def test_an_expert_that_was_ruled_out_is_never_taken_over():
    """Of groups of experts a few are chosen first; the others' experts are ranked last, with a score of -inf."""
    routing = routing_of([[5, 6, 7, 8, 0, 1, 2, 3, 4, 9], [0, 1, 2, 3, 5, 4, 6, 7, 8, 9]], [1.0, 0.0])
    routing.scores = routing.scores.copy()
    routing.scores[1, 5] = -math.inf

    policy_of().apply(routing)

    assert chosen(routing)[1] == [0, 6]


def test_a_slot_that_another_policy_took_away_stays_away():
    routing = routing_of([[0, 1, 2, 3, 4, 5]], [1.0])
    routing.mute[0, 1] = True

    policy_of().apply(routing)

    assert routing.mute[0].tolist() == [False, True, False, False]
    assert routing.ids[0, [0, 2, 3]].tolist() == [0, 2, 3]


def test_counts_follow_the_model():
    """With 8 of 128 experts they are the published ones."""
    options = EdgexpertOptions(importance="uniform")

    assert sizes(options, 8, 128) == [(8, 8), (10, 6), (12, 4)]
    assert sizes(options, 4, 32) == [(4, 4), (5, 3), (6, 2)]
    assert sizes(options, 1, 4) == [(1, 1), (2, 1), (2, 1)]
    assert sizes(options, 2, 2) == [(2, 2), (2, 2), (2, 1)]


@pytest.mark.parametrize(
    "options",
    [
        {"minor": [2, 3]}, {"minor": [2, 0]}, {"trivial": [3]}, {"low": 0.8}, {"high": 0.2}, {"high": math.nan},
        {"scope": "layer"}, {"high": -1}, {"importance": ""}, {"importance": 3}, {"importance_options": 3},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options):
    with pytest.raises(ValidationError):
        EdgexpertOptions(**{"importance": "uniform", **options})
