"""What an automatic cache becomes: the default policy or what replayed best for the model, or no cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bmoe.verdicts import Verdict, remember_policy

from .test_plan import FACTS, MIB, plan


def test_a_cache_below_the_cycle_is_what_a_person_asks_for_and_never_what_auto_becomes():
    assert 3 * MIB == plan("cache.budget_mb=3").budget.bytes
    assert 2 * MIB == plan("cache.ceil_mb=2", "cache.policy=next-use").budget.bytes
    assert 0 == plan("cache.ceil_mb=2").budget.bytes


def test_auto_is_the_policy_that_replayed_best_for_this_model(tmp_path):
    memory = tmp_path / "known.json"
    why = "replayed at 3 MiB: decay reads 90.0 % of the bytes of lru"
    assert remember_policy(memory, FACTS, Verdict("decay", why))

    made = plan(remember=memory)
    assert ("decay", why) == (made.cache.name, made.resolved()["cache"]["why"])
    for other in (
        plan(remember=memory, facts=replace(FACTS, name="another")),
        plan(),
    ):
        assert "next-use" == other.cache.name
        assert "the default; bmoe replay TRACE --choose finds the best for a model" == other.cache_why
    given = plan("cache.options.half_life=4", remember=memory)
    assert ("next-use", "the default, of which cache.options are") == (given.cache.name, given.cache_why)
    named = plan("cache.policy=lfu", remember=memory)
    assert ("lfu", "as the profile says") == (named.cache.name, named.cache_why)


@pytest.mark.parametrize("plugin", ["gone", "lru.x", 3, None])
def test_what_is_remembered_and_not_there_changes_nothing(tmp_path, plugin):
    memory = tmp_path / "known.json"
    remember_policy(memory, FACTS, Verdict(plugin, "because"))

    assert "next-use" == plan(remember=memory).cache.name


def test_what_became_of_an_automatic_budget_is_among_the_notices():
    made = plan("cache.ceil_mb=2")

    assert 0 == made.budget.bytes
    assert made.notices[0].startswith('cache.budget_mb = "auto" became 0: 2 MiB (cache.ceil_mb = 2), one token uses ')
    assert list(made.notices) == made.resolved()["notices"]
