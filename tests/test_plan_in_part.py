"""What can be judged of a profile although a part is wrong or there is no model, and what is left open then."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
from pydantic import Field

from bmoe import Options, Provider
from bmoe.machine import Machine
from bmoe.planner import try_plan
from bmoe.plugins import load_plugins
from bmoe.profile import load_profile, read_profile
from bmoe.registry import load_registry

MACHINE = Machine(3, 4096, 512 << 20, "Linux", "6", "x86_64", 65530)


class Tuning(Options):
    k: int = Field(4, ge=1)


def problems(table, mine=None):
    """The lines of ``table``, streamed by pread unless it says otherwise, where cache policy "mine" is ``mine``."""
    profile = read_profile({"fetch": {"plugin": "pread"}, **table})
    catalog = load_plugins(profile, load_registry())
    tables = {kind: dict(found) for kind, found in catalog.providers.items()}
    if mine is not None:
        tables["cache"]["mine"] = mine
    made, found = try_plan(profile, replace(catalog, providers=MappingProxyType(tables)), None, MACHINE)
    assert made is None
    return profile.in_order(found)


def mine(**fields):
    return Provider("mine", lambda options, facts: None, **fields)


def test_names_and_settings_need_no_model():
    lines = problems({"cache": {"policy": "lur"}, "chat": {"think": True}, "sink": [{"plugin": "jsnl"}]})

    paths = ["cache.policy", "chat.think", "sink.0.plugin"]
    assert paths == [line.removeprefix("profile: ").partition(" ")[0] for line in lines]


def test_nothing_is_judged_that_only_a_model_could_tell():
    assert [] == problems({"cache": {"policy": "mine", "budget_mb": 0.001}}, mine(needs=("arch:other",)))


def test_a_budget_without_use_needs_no_model_to_be_refused():
    (line,) = problems({"cache": {"policy": "none", "budget_mb": 5}})

    assert line.startswith('profile: cache.budget_mb = 5 has no use with cache.policy = "none"')


def test_a_plugin_with_wrong_options_still_takes_part_in_the_combinations():
    table = {"cache": {"policy": "mine", "options": {"k": 0}}}

    assert [
        'profile: cache.policy = "mine" cannot run with fetch.plugin = "pread"; change one of them',
        "profile: cache.options.k = 0 is too small; give at least 1",
    ] == problems(table, mine(options=Tuning, excludes=("fetch:pread",)))


def test_what_an_unknown_plugin_may_be_is_not_missed():
    (line,) = problems({"cache": {"policy": "mine"}, "fetch": {"plugin": "aoi"}}, mine(needs=("fetch:aio",)))

    assert line.startswith('profile: fetch.plugin = "aoi" is not a fetcher')


@pytest.mark.parametrize(
    ("table", "fields"),
    [
        ({"fetch": {"plugin": 3}}, {"needs": ("fetch:aio",)}),
        ({"fetch": {"plugn": "aio"}}, {"needs": ("fetch:aio",)}),
        ({"fetsh": {"plugin": "aio"}, "fetch": {}}, {}),
        ({"fetch": 3}, {"needs": ("fetch:aio",)}),
        ({"sink": 3}, {"needs": ("sink:jsonl",)}),
        ({"sink": [{}]}, {"needs": ("sink:jsonl",)}),
        ({"plugin": "umbra.x"}, {}),
        ({"plugins": {"allow_experimental": "yes"}}, {"experimental": True}),
        ({"stream": {"enabled": "no"}, "model": {"repack": True}}, {}),
        ({"routing": [3, {"plugn": "x"}]}, {}),
        ({"prefetch": {}}, {}),
    ],
)
def test_what_follows_from_a_refused_value_is_no_problem_of_its_own(table, fields):
    assert [] == problems({"cache": {"policy": "mine"}, **table}, mine(**fields))


def test_a_refused_option_is_not_missing_as_well():
    class Needy(Options):
        since: str

    table = {"cache": {"policy": "mine", "options": {"since": object()}}}

    assert [] == problems(table, mine(options=Needy))


def test_a_sink_after_a_wrong_one_keeps_its_index():
    (line,) = problems({"sink": [{"options": 3}, {"plugin": "jsnl"}]})

    assert line.startswith('profile: sink.1.plugin = "jsnl" is not a sink')


def test_a_whole_profile_has_nothing_refused():
    assert [] == load_profile({}).refused
