"""Replays under a budget in bytes count what an independent one counts; the published figures come out."""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.contracts import expert_key
from bmoe.errors import PluginError
from bmoe.replay import most_hits, replay
from bmoe.replay.contender import Contender
from bmoe.replay.furthest import play_belady
from bmoe.replay.lookups import Lookups, in_columns
from bmoe.replay.play import play, play_lru
from bmoe.replay.read_lookups import read_lookups
from bmoe.testing import traces
from bmoe_plugins.caches.lru import Lru
from bmoe_plugins.caches.none import NoPolicy

sys.path.insert(0, str(Path(__file__).parent))
from oracle import naive_replay

PUBLISHED = Path(__file__).parent / "published"
SAME = settings(max_examples=200, deadline=None, derandomize=True, database=None)

SIZES = {0: 7, 1: 4, 2: 5}
EXPERTS = st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True)
TOKEN = st.tuples(st.booleans(), st.dictionaries(st.integers(0, 2), EXPERTS, min_size=1, max_size=3))
TOKENS = st.lists(TOKEN, min_size=1, max_size=12)


def columns(tokens: list[tuple[bool, dict[int, list[int]]]], sizes: dict[int, int] = SIZES) -> Lookups:
    """A trace of tokens, each of the prompt or of decode, with experts by layer."""
    rows = [
        (0, int(decode), step, layer, slot, expert)
        for step, (decode, layers) in enumerate(tokens)
        for layer, experts in sorted(layers.items())
        for slot, expert in enumerate(experts)
    ]
    return in_columns(
        np.array(rows, np.int32), decode=1, source="made", model="made", arch="made", n_layer=3, n_expert=5, n_used=3,
        entry_bytes=sizes,
    )  # fmt: skip


def told(played):
    return played.lookups, played.hits, played.missed_bytes


def plain(trace: Lookups):
    return [(tuple(keys), *rest) for keys, *rest, _, _ in trace.touches()]


@SAME
@given(TOKENS, st.integers(0, 60))
def test_lru_counts_what_the_oracle_counts_on_both_paths(tokens, budget):
    trace = columns(tokens)
    expected = naive_replay(plain(trace), budget, "lru")

    assert expected == told(play(Lru(), trace, budget))
    assert expected == told(play_lru(trace, budget))


@SAME
@given(TOKENS, st.integers(0, 60))
def test_beladys_rule_counts_what_the_oracle_counts_with_entries_of_one_size(tokens, budget):
    trace = columns(tokens, dict.fromkeys(SIZES, 4))

    assert naive_replay(plain(trace), budget, "belady") == told(play_belady(trace, budget))
    assert naive_replay(plain(trace), budget, "optimum") == told(play_belady(trace, budget, whole_layer=False))


@SAME
@given(TOKENS, st.integers(3, 15))
def test_in_whole_entries_it_is_the_replay_of_the_gates_and_within_their_bound(tokens, room):
    trace = columns([(True, layers) for _, layers in tokens], dict.fromkeys(SIZES, 4))
    steps = [[(layer, experts) for layer, experts in sorted(layers.items())] for _, layers in tokens]

    for policy in (Lru, NoPolicy):
        assert replay(policy(), steps, room).hits == play(policy(), trace, 4 * room).hits
    # the bound of the gates may also give up what was used just now, which no policy may
    assert most_hits(steps, room) >= play_belady(trace, 4 * room, whole_layer=False).hits


@SAME
@given(TOKENS, st.integers(0, 60))
def test_no_policy_passes_the_optimum_of_entries_of_one_size(tokens, budget):
    trace = columns([(True, layers) for _, layers in tokens], dict.fromkeys(SIZES, 4))
    bound = play_belady(trace, budget, whole_layer=False).hits

    assert play_lru(trace, budget).hits <= bound
    assert play(NoPolicy(), trace, budget).hits <= bound
    assert play_belady(trace, budget).hits <= bound


def test_a_seeded_trace_counts_what_the_oracle_counts():
    tokens = [
        (step > 20, dict(each)) for step, each in enumerate(traces.zipf(7, layers=3, experts=5, used=2, steps=120))
    ]
    trace = columns(tokens)

    for budget in (20, 30, 45):
        assert (
            naive_replay(plain(trace), budget, "lru")
            == told(play_lru(trace, budget))
            == told(play(Lru(), trace, budget))
        )


def test_a_prompt_warms_the_cache_and_is_not_counted():
    trace = columns([(False, {0: [1, 2]}), (True, {0: [2, 1]}), (True, {0: [3, 1]})])

    assert (4, 3, 7) == told(play_lru(trace, 21))
    assert (2, 14, 2) == (trace.tokens, trace.cycle_bytes, trace.cycle)


def test_a_budget_below_the_token_cycle_has_no_hits_with_lru():
    trace = columns([(True, {0: [0], 1: [0], 2: [0]})] * 5)

    assert 16 == trace.cycle_bytes
    assert 0 == play_lru(trace, 15).hits
    assert 12 == play_lru(trace, 16).hits


@pytest.mark.parametrize("answer", [99, "x", None, expert_key(0, 2)])
def test_a_wrong_victim_is_refused(answer):
    policy = Lru()
    policy.victim = lambda pinned: answer
    with pytest.raises(PluginError, match=r"victim\(\)"):
        play(policy, columns([(True, {0: [1]}), (True, {0: [2]})]), 7)


@pytest.fixture(name="published", scope="module")
def _published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")

    def read(name):
        path = folder / f"{name}.route.csv"
        if not path.exists():
            path.write_bytes(lzma.decompress((PUBLISHED / f"{name}.route.csv.xz").read_bytes()))
        return read_lookups(path)

    return read


@pytest.mark.parametrize(
    ("name", "mib", "lru", "belady"),
    [
        ("qwen", 2000, 56.5, 79.4),
        ("qwen", 4000, 80.3, 92.7),
        ("gemma", 2000, 62.2, 80.6),
        ("gemma", 4000, 81.9, 92.9),
        ("gptoss", 2000, 30.9, 59.9),
        ("gptoss", 3000, 44.8, 67.8),
    ],
)
def test_the_published_hit_rates_come_out_to_the_decimal(published, name, mib, lru, belady):
    trace, budget = published(name), mib << 20
    policy = Contender("lru", "lru").built(trace, budget)

    assert (
        lru == round(100 * play_lru(trace, budget).hit_rate, 1) == round(100 * play(policy, trace, budget).hit_rate, 1)
    )
    assert belady == round(100 * play_belady(trace, budget).hit_rate, 1)


@pytest.mark.parametrize("name", ["qwen", "gemma", "gptoss"])
def test_the_expected_next_use_reads_less_than_lru_on_every_published_trace(published, name):
    trace = published(name)
    shares = {}
    for mib in (500, 1000, 2000, 3000, 4000, 6000, 8000):
        budget = mib << 20
        policy = Contender("next-use", "next-use").built(trace, budget)
        shares[mib] = play(policy, trace, budget).missed_bytes / play_lru(trace, budget).missed_bytes

    assert max(shares.values()) < 1, shares
    assert max(shares[mib] for mib in (2000, 3000, 4000)) <= 0.95, shares


@pytest.mark.parametrize("policy", ["lfu", "decay", "next-use", "edgemoe"])
def test_below_one_tokens_cycle_there_are_hits_where_lru_has_none(published, policy):
    trace, budget = published("qwen"), 500 << 20

    assert 0 == play_lru(trace, budget).hits
    assert play(Contender(policy, policy).built(trace, budget), trace, budget).hit_rate > 0.2
