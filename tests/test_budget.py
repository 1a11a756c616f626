"""The cache's budget is counted in pages, bounded by the machine, and never a size at which nothing would hit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bmoe import BankFacts, ModelFacts, ProjectionFacts
from bmoe.budget import MIB, decide_budget, held_bytes
from bmoe.machine import Machine
from bmoe.profile import CacheSection

PAGE = 4096


def bank(layer, stride=300_000, n_expert=8, n_used=2):
    names = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    projections = tuple(ProjectionFacts(f"blk.{layer}.{n}.weight", n, 0, 4103, stride, "q4_0") for n in names)
    return BankFacts(layer, 0, n_expert, n_used, projections)


FACTS = ModelFacts(
    path="m.gguf",
    name="m",
    arch="qwen3moe",
    shards=(),
    n_layer=4,
    n_expert=8,
    n_used=2,
    n_embd=64,
    n_vocab=100,
    n_ctx_train=4096,
    n_nextn=0,
    banks=tuple(bank(layer) for layer in range(4)),
    dense=(),
)
ENTRY = held_bytes(FACTS.banks[0], PAGE)
CYCLE = 4 * 2 * ENTRY
EVERYTHING = 4 * 8 * ENTRY


def decide(policy="lru", *, below_cycle=False, free=512, facts=FACTS, **section):
    """The outcome with ``free`` MiB of memory, no floor, and a policy that does or does not hit below one cycle."""
    available = None if free is None else int(free * MIB)
    machine = Machine(2, PAGE, available, "Linux", "6", "x86_64", None)
    chosen = CacheSection(**{"floor_mb": 0, "policy": policy, **section})
    return decide_budget(chosen, "lru" if policy == "auto" else policy, facts, machine, lambda _: below_cycle)


def test_an_entry_is_counted_in_the_pages_that_its_slices_can_hold():
    assert 3 * (math.ceil(300_000 / PAGE) + 1) * PAGE == ENTRY


def test_an_explicit_budget_is_taken_as_it_is():
    outcome = decide(budget_mb=20)

    budget = outcome.budget
    assert (20 * MIB, 20, 20 * MIB // ENTRY) == (budget.bytes, budget.requested, budget.capacity)
    assert (8, CYCLE, "", "") == (budget.cycle, budget.cycle_bytes, outcome.problem, outcome.notice)


def test_no_budget_is_larger_than_all_experts():
    for section in ({"budget_mb": 400}, {"budget_mb": "auto"}):
        assert (EVERYTHING, 32) == (decide(**section).budget.bytes, decide(**section).budget.capacity)


def test_an_automatic_budget_is_what_is_free_less_the_floor():
    outcome = decide(floor_mb=500, free=520)

    assert (20 * MIB, "auto", "") == (outcome.budget.bytes, outcome.budget.requested, outcome.notice)


def test_an_automatic_budget_is_bounded_by_the_ceiling():
    assert 12 * MIB == decide(ceil_mb=12).budget.bytes


def test_a_budget_below_one_tokens_cycle_is_a_problem_that_says_what_is_needed():
    problem = decide(budget_mb=3).problem

    expected = "cache.budget_mb = 3 is below what one token uses (8 experts), so that lru would never hit; "
    assert problem == f"{expected}give at least {math.ceil(CYCLE / MIB)}, or 0 to turn the cache off"


def test_the_limit_is_exact_to_the_byte():
    assert "" == decide(budget_mb=CYCLE / MIB).problem
    assert "" != decide(budget_mb=(CYCLE - 1) / MIB).problem


@pytest.mark.parametrize("free", [3, 512])
def test_a_policy_that_hits_below_the_cycle_may_have_less(free):
    section = {"budget_mb": 3} if free == 512 else {}

    outcome = decide("mine", below_cycle=True, free=free, **section)

    assert (3 * MIB, "", "") == (outcome.budget.bytes, outcome.problem, outcome.notice)


def test_even_such_a_policy_needs_room_for_one_expert():
    assert "is below what one token uses" in decide("mine", below_cycle=True, budget_mb=0.1).problem


def test_an_automatic_budget_below_the_cycle_becomes_0_with_a_notice():
    need = math.ceil(CYCLE / MIB)

    outcome = decide(floor_mb=600, free=603)

    assert 0 == outcome.budget.bytes
    expected = f'cache.budget_mb = "auto" became 0: 3 MiB (603 MiB free, cache.floor_mb = 600), one token uses {need}'
    assert expected == outcome.notice
    assert "2 MiB (cache.ceil_mb = 2)" in decide(ceil_mb=2).notice
    assert "cache.floor_mb = 100000000)" in decide(floor_mb=1e8).notice
    assert (0, "") == (decide(floor_mb=9999).budget.bytes, decide(floor_mb=9999).problem)


def test_where_free_memory_is_unknown_an_automatic_budget_is_0_and_says_so():
    outcome = decide(free=None)

    assert 0 == outcome.budget.bytes
    assert "free memory is unknown on this system; give cache.budget_mb" in outcome.notice
    assert 20 * MIB == decide(free=None, budget_mb=20).budget.bytes


def test_budget_0_turns_the_cache_off_and_notes_that_a_named_policy_is_not_used():
    assert (0, "") == (decide("auto", budget_mb=0).budget.bytes, decide("auto", budget_mb=0).notice)
    assert 'cache.policy = "lru" is not used: cache.budget_mb is 0' == decide("lru", budget_mb=0).notice


def test_policy_none_means_budget_0():
    for budget in ("auto", 0):
        outcome = decide("none", budget_mb=budget)
        assert (0, "", "") == (outcome.budget.bytes, outcome.problem, outcome.notice)
    expected = 'cache.budget_mb = 64 has no use with cache.policy = "none"; set 0 or choose a policy'
    assert expected == decide("none", budget_mb=64).problem


def test_an_explicit_budget_beyond_free_memory_is_a_notice():
    assert "cache.budget_mb is 20 MiB, but only 10 are free" == decide(budget_mb=20, free=10).notice


def test_layers_of_different_size_count_each_at_its_own():
    facts = replace(FACTS, banks=(bank(0), bank(1, stride=100, n_expert=1)))

    budget = decide(budget_mb=4, facts=facts).budget

    assert (3, 2 * ENTRY + held_bytes(facts.banks[1], PAGE)) == (budget.cycle, budget.cycle_bytes)
    assert 4 * MIB // ENTRY == budget.capacity
