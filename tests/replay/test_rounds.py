"""A trace with drafts is replayed as the engine's store runs: a verify batch is one look-up of its union per layer, and
the cache hears of accepted tokens alone, in their order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.contracts import expert_key
from bmoe.replay.contender import Contender
from bmoe.replay.furthest import play_belady
from bmoe.replay.lookups import in_columns
from bmoe.replay.parquet import COLUMNS
from bmoe.replay.play import play
from bmoe.replay.read_lookups import read_lookups
from bmoe.replay.route_trace import (
    ACCEPTED,
    DECODE,
    GUESS,
    PREFILL,
    REJECTED,
    LayerBytes,
    Routed,
    RouteTrace,
    TraceError,
    write_trace,
)
from bmoe_plugins.caches.lru import Lru

SAME = settings(max_examples=200, deadline=None, derandomize=True, database=None)
SIZES = {0: 7, 1: 4, 2: 5}
EXPERTS = st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True)
TOKEN = st.tuples(EXPERTS, EXPERTS, EXPERTS)
BATCH = st.lists(TOKEN, min_size=2, max_size=4)
DECODES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([PREFILL, DECODE, GUESS]), st.lists(TOKEN, min_size=1, max_size=1), st.just(1)),
        st.tuples(st.just(ACCEPTED), BATCH, st.integers(1, 4)),
    ),
    min_size=1,
    max_size=9,
)


class Noting(Lru):
    """Notes what the cache hears and what comes in cold."""

    def __init__(self):
        super().__init__()
        self.heard, self.cold = [], set()

    def touch(self, keys, /):
        self.heard.append(list(keys))
        super().touch(keys)

    def admit(self, key, cold, /):
        if cold:
            self.cold.add(key)
        super().admit(key, cold)


def rows_of(decodes):
    """Rows as the tracer writes them: of a batch the first tokens are accepted, ``kept`` of them at most."""
    rows, step, number = [], 0, -1
    for phase, tokens, kept in decodes:
        kept = min(kept, len(tokens))
        verifies = phase == ACCEPTED
        number += verifies
        for layer in range(3):
            for place, token in enumerate(tokens):
                said = (ACCEPTED if place < kept else REJECTED) if verifies else phase
                named = (number if verifies else number + 1) if phase >= ACCEPTED else -1
                for slot, expert in enumerate(token[layer]):
                    rows.append(
                        Routed(0, said, step + place, layer, slot, expert, 0.5, 0, 0, named, place if verifies else 0)
                    )
        step += kept if phase != GUESS else 0
    return rows


def columns(decodes):
    wide = np.array([[*row[:6], *row[9:]] for row in rows_of(decodes)], np.int32)
    return in_columns(
        wide, decode=DECODE, source="made", model="made", arch="made", n_layer=3, n_expert=6, n_used=2,
        entry_bytes=SIZES,
    )  # fmt: skip


def keys_of(layer, experts):
    return [expert_key(layer, expert) for expert in experts]


def union(tokens, layer):
    """What a batch uses in a layer, in the order of the last use."""
    used = [expert for token in tokens for expert in token[layer]]
    return keys_of(layer, list(dict.fromkeys(reversed(used)))[::-1])


@SAME
@given(DECODES)
def test_touches_are_the_unions_and_what_is_heard_are_accepted_tokens(decodes):
    trace = columns(decodes)
    touches, heard = [], []
    for phase, tokens, kept in decodes:
        touches += [(union(tokens, layer), SIZES[layer], phase not in (PREFILL, GUESS)) for layer in range(3)]
        heard += [keys_of(layer, token[layer]) for token in tokens[:kept] for layer in range(3)]

    assert [(touch.keys, touch.entry_bytes, touch.counted) for touch in trace.touches()] == touches
    assert [touch.ends_token for touch in trace.touches()] == [False, False, True] * len(decodes)
    policy = Noting()
    play(policy, trace, 1 << 20)  # all fits, so that all is resident when it is heard
    assert policy.heard == heard
    drafted = {key for phase, tokens, _ in decodes if phase == ACCEPTED for at in range(3) for key in union(tokens, at)}
    assert policy.cold <= drafted
    assert trace.tokens == sum(min(k, len(tokens)) for p, tokens, k in decodes if p not in (PREFILL, GUESS))


@SAME
@given(DECODES, st.integers(0, 120))
def test_counts_are_of_text_and_bytes_of_all_but_the_prompt(decodes, budget):
    trace = columns(decodes)
    played = play(Lru(), trace, budget)

    wanted = [(union(tokens, at), phase) for phase, tokens, _ in decodes for at in range(3)]
    assert played.lookups == sum(len(keys) for keys, phase in wanted if phase not in (PREFILL, GUESS))
    assert 0 <= played.hits <= played.lookups
    # nothing is kept: every use is read, guesses included
    everything = sum(len(keys) * SIZES[keys[0] >> 24] for keys, phase in wanted if phase != PREFILL)
    off = play(Lru(), trace, 0)
    assert (off.hits, off.missed_bytes) == (0, everything)
    assert play(Lru(), trace, 1 << 20).missed_bytes <= played.missed_bytes or budget < trace.cycle_bytes
    assert play_belady(trace, 1 << 20, whole_layer=False) == play(Lru(), trace, 1 << 20)


def test_what_only_rejected_tokens_used_goes_first():
    """The accepted token's expert 0 stays; 1, which a rejected one used, is given up for 2 although it came later."""
    token = lambda expert: ([expert], [0], [0])  # noqa: E731
    batch = (ACCEPTED, [token(0), token(1)], 1)
    after = [(DECODE, [token(2)], 1), (DECODE, [token(0)], 1)]
    trace = columns([batch, *after])

    room = 2 * 7 + 4 + 5  # two experts of layer 0, one of each other layer
    played = play(Lru(), trace, room)
    # of 4 + 3 + 3 look-ups those of layers 1 and 2 after the first batch, and expert 0 again, are hits
    assert (played.lookups, played.hits) == (4 + 3 + 3, 5)


def test_a_policy_by_name_is_replayed_with_drafts():
    trace = columns([(ACCEPTED, [([0, 1], [0, 1], [0, 1]), ([2, 1], [0, 3], [4, 1])], 2)] * 3)

    assert Contender("lru", "lru").play(trace, 30) == play(Lru(), trace, 30)
    assert trace.drafts.batches == 3


def test_two_tokens_of_a_tree_share_a_position():
    rows = [
        Routed(0, phase, step, layer, slot, expert, 0.5, 0, 0, 0, place)
        for layer in (0, 1)
        for place, (phase, step) in enumerate([(ACCEPTED, 8), (REJECTED, 9), (ACCEPTED, 9)])
        for slot, expert in enumerate([place, 3 + place])
    ]
    wide = np.array([[*row[:6], *row[9:]] for row in rows], np.int32)
    trace = in_columns(
        wide, decode=1, source="t", model="", arch="", n_layer=2, n_expert=6, n_used=2, entry_bytes={0: 1, 1: 1}
    )
    one, two = trace.touches()

    assert (one.keys, two.keys) == (keys_of(0, [0, 3, 1, 4, 2, 5]), keys_of(1, [0, 3, 1, 4, 2, 5]))
    assert (one.draft.heard, trace.tokens) == ([], 2)
    assert [use.keys for use in two.draft.heard] == [
        keys_of(layer, experts) for experts in ([0, 3], [2, 5]) for layer in (0, 1)
    ]


@SAME
@given(DECODES)
def test_a_file_is_what_its_rows_are(tmp_path_factory, decodes):
    path = tmp_path_factory.getbasetemp() / "drafts.csv"
    layers = {layer: LayerBytes(size, 1) for layer, size in SIZES.items()}
    write_trace(path, RouteTrace("made", "made", 3, 6, 2, layers, rows_of(decodes), True))
    expected = columns(decodes)
    if not expected.counted.any():
        with pytest.raises(TraceError, match="has no decode row"):
            read_lookups(path)
        return

    assert list(read_lookups(path).touches()) == list(expected.touches())


def test_rows_of_drafts_without_their_columns_are_refused(tmp_path):
    path = tmp_path / "cut.csv"
    layers = {layer: LayerBytes(size, 1) for layer, size in SIZES.items()}
    rows = rows_of([(ACCEPTED, [([0], [1], [2])] * 2, 1)])
    write_trace(path, RouteTrace("made", "made", 3, 6, 2, layers, rows, False))

    with pytest.raises(TraceError, match=r"cut\.csv: has rows of drafts and no column 'round'; record it again"):
        read_lookups(path)
    assert len(COLUMNS) == 6
