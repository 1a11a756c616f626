"""The estimate: its arithmetic on a case done by hand, and what must never make it slower."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.contracts import BankFacts, ModelFacts, ProjectionFacts
from bmoe.fit import overhead
from bmoe.fit.estimate import PAGE, Costs, estimate
from bmoe.fit.overhead import Overhead
from bmoe.fit.trial import run
from bmoe.fit.verdict import held_share
from bmoe.plugins import load_all
from bmoe.registry import load_registry

BANK = BankFacts(0, 0, 16, 4, (ProjectionFacts("t", "ffn_up_exps", 0, 0, 1 << 20, "Q4_K"),))
FACTS = ModelFacts("m", "m", "qwen3moe", (), 2, 16, 4, 256, 512, 512, 0, (BANK, replace(BANK, layer=1)), ())
OVERHEAD = Overhead(layer_s=0.001, entry_s=0.0001, byte_s=1e-10, shared_s=0.00005)
COSTS = Costs(0.01, OVERHEAD, first_s=0.002, next_s=0.001, slice_bytes=1 << 20)
positive = st.floats(1e-6, 1.0)


def test_by_hand_with_nothing_in_memory():
    found = estimate(FACTS, COSTS, 0.0, cached=False)
    entry = (1 << 20) + PAGE - 1

    assert 8 * entry == found.bytes_per_token
    assert 0.012 == pytest.approx(found.compute_s)
    assert 2 * (0.001 + 4 * 0.001 * entry / (1 << 20)) == pytest.approx(found.read_s)
    assert 8 * 0.00005 == pytest.approx(found.manage_s)
    assert found.tok_s == pytest.approx(1 / (found.compute_s + found.read_s + found.manage_s))


def test_by_hand_with_everything_in_memory():
    found = estimate(FACTS, COSTS, 1.0)

    assert (0.0, 0.0, 0.0) == (found.bytes_per_token, found.read_s, found.manage_s)
    assert 1 / 0.012 == pytest.approx(found.tok_s)


@given(hit=st.floats(0, 1), compute=positive, first=positive, next_=positive)
def test_the_range_is_no_wider_than_promised_and_holds_the_expected(hit, compute, first, next_):
    found = estimate(FACTS, replace(COSTS, compute_s=compute, first_s=first + next_, next_s=next_), hit)

    assert found.high <= 1.6 * found.low
    assert found.low < found.tok_s < found.high


@given(rates=st.tuples(st.floats(0, 1), st.floats(0, 1)), first=positive, next_=positive)
def test_more_hits_are_never_slower(rates, first, next_):
    costs = replace(COSTS, first_s=first + next_, next_s=next_)
    less, more = (estimate(FACTS, costs, rate) for rate in sorted(rates))

    assert more.token_s <= less.token_s * (1 + 1e-9)
    assert more.bytes_per_token <= less.bytes_per_token


@given(hit=st.floats(0, 1), factor=st.floats(1, 100), first=positive, next_=positive)
def test_a_faster_drive_is_never_slower(hit, factor, first, next_):
    costs = replace(COSTS, first_s=first + next_, next_s=next_)

    assert estimate(FACTS, costs.faster_drive(factor), hit).token_s <= estimate(FACTS, costs, hit).token_s * (1 + 1e-9)


@given(hit=st.floats(0, 1), share=st.floats(0.01, 1))
def test_less_of_the_processor_is_never_faster(hit, share):
    assert estimate(FACTS, replace(COSTS, share=share), hit).token_s >= estimate(FACTS, COSTS, hit).token_s


@given(hit=st.floats(0, 1), scale=st.floats(0.1, 1))
def test_smaller_experts_are_never_slower(hit, scale):
    assert estimate(FACTS, COSTS, hit, scale=scale).token_s <= estimate(FACTS, COSTS, hit).token_s * (1 + 1e-9)


PLAN = SimpleNamespace(facts=FACTS, budget=SimpleNamespace(bytes=16 << 20))


def test_a_cache_for_all_slices_holds_all_and_none_holds_none():
    assert 1.0 == held_share(PLAN, 32 << 20)
    assert 0.0 == held_share(PLAN, 0)


@given(nbytes=st.integers(0, 40 << 20))
def test_what_is_held_fills_the_budget(nbytes):
    share = held_share(PLAN, nbytes)
    each = (1 << 20) + PAGE * (1 - share)

    assert 0 <= share <= 1
    assert share == 1 or nbytes == pytest.approx(32 * share * each, abs=1)


def test_a_trial_goes_on_where_a_text_would_end():
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    cost = run("demo", "bmoe-ref", ["model.threads=1", "sink=[]"], 24)

    assert 24 == cost.decodes == cost.tokens
    assert 24 * 8 * 4 == cost.lookups
    assert 0 < cost.hits < cost.lookups


def test_the_bundled_model_says_what_a_place_in_a_cache_takes():
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    rows = load_all(load_registry()).archs
    resident, streamed = (overhead.measure(rows, 1, streaming=streaming) for streaming in (False, True))

    assert (0.0, 0.0, 0.0) == (resident.entry_s, resident.byte_s, resident.shared_s)
    assert 0 < streamed.shared_s < 0.01
    assert 0 < streamed.entry_s < 0.01
    assert 0 < streamed.layer_s < 0.01
