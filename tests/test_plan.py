"""A plan resolves every choice and size, or reports every reason why the profile cannot run, and ignores nothing."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
from pydantic import Field, field_validator

from bmoe import BankFacts, ModelFacts, Options, ProjectionFacts, Provider, ShardFacts, TensorFacts, hookimpl
from bmoe.budget import MIB, held_bytes
from bmoe.errors import PluginError, ProfileError
from bmoe.machine import Machine
from bmoe.planner import make_plan
from bmoe.plugins import load_plugins
from bmoe.profile import load_profile
from bmoe.registry import load_registry

PAGE = 4096
MACHINE = Machine(3, PAGE, 512 * MIB, "Linux", "6", "x86_64", 65530)


def bank(layer, stride=300_000, n_expert=8, n_used=2):
    projections = tuple(
        ProjectionFacts(f"blk.{layer}.{name}.weight", name, 0, 4096 + 7 * index, stride, "q4_0")
        for index, name in enumerate(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"))
    )
    return BankFacts(layer, 0, n_expert, n_used, projections)


SHARD = ShardFacts("/models/m.gguf", 100 * MIB)
OUTPUT = TensorFacts("output.weight", 0, 0, MIB, (64, 100), "f32")
BANKS = tuple(bank(layer) for layer in range(4))
FACTS = ModelFacts(SHARD.path, "m", "qwen3moe", (SHARD,), 4, 8, 2, 64, 100, 4096, 0, BANKS, (OUTPUT,))
ENTRY = held_bytes(FACTS.banks[0], PAGE)
CYCLE = 4 * 2 * ENTRY


@pytest.fixture(name="umbra", autouse=True)
def _umbra(monkeypatch):
    """Make the fake distribution in this folder look installed, and forget its modules afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "umbra"]:
        del sys.modules[name]


def catalog_of(profile, *providers):
    """What is loaded for ``profile``, with ``(kind, Provider)`` pairs added."""
    catalog = load_plugins(profile, load_registry())
    tables = {kind: dict(table) for kind, table in catalog.providers.items()}
    for kind, provider in providers:
        tables[kind][provider.name] = provider
    origins = {**catalog._origins, **{(kind, provider.name): "fake" for kind, provider in providers}}
    return replace(catalog, providers=MappingProxyType(tables), _origins=origins)


def plan(*overrides, facts=FACTS, machine=MACHINE, providers=(), remember=None, **tables):
    profile = load_profile({"fetch": {"plugin": "pread"}, "cache": {"floor_mb": 0}, **tables}, overrides=overrides)
    return make_plan(profile, catalog_of(profile, *providers), facts, machine, remember)


def refused(*overrides, **arguments):
    with pytest.raises(ProfileError) as caught:
        plan(*overrides, **arguments)
    assert all(len(line.splitlines()) == 1 for line in caught.value.problems)
    return caught.value.problems


def cache(name="mine", below_cycle=False, **fields):
    return ("cache", Provider(name, lambda options, facts: SimpleNamespace(below_cycle=below_cycle), **fields))


def fetch(name, **fields):
    return ("fetch", Provider(name, lambda options, facts: None, **fields))


def test_everything_is_resolved():
    made = plan("model.ctx=1000", "cache.budget_mb=20")

    assert ("next-use", "pread", "mmap", "qwen3moe") == (
        made.cache.name,
        made.fetch.name,
        made.dense.name,
        made.row.name,
    )
    assert (3, 1000, 512, 4, True, "projection") == (
        made.threads,
        made.ctx,
        made.ubatch,
        made.lanes,
        made.direct,
        made.overlap,
    )
    assert (20 * MIB, 20) == (made.budget.bytes, made.budget.requested)
    assert (8, CYCLE, 20 * MIB // ENTRY) == (made.budget.cycle, made.budget.cycle_bytes, made.budget.capacity)
    assert (False, False, True) == (made.lossy, made.experimental, made.streaming)
    assert ((), (), None, None) == (made.sinks, made.routing, made.prefetch, made.draft)


def test_threads_and_ubatch_are_bounded_by_what_there_is():
    assert 7 == plan("model.threads=7").threads
    assert 100 == plan("model.ctx=100", "model.ubatch=300").ubatch


def test_what_was_resolved_is_json_and_complete():
    made = plan("sink.0.plugin=jsonl", 'sink.0.options={path = "out.jsonl"}', "sampling.temp=0.5")

    shown = json.loads(json.dumps(made.resolved(), allow_nan=False))

    assert "out.jsonl" == shown["sinks"][0]["options"]["path"]
    expected = (
        "profile model arch arch_origin streaming threads ctx ubatch kv_type flash_attention repack overlap cache "
    )
    expected += "fetch dense prefetch draft routing importance sinks sampling lossy experimental notices"
    assert set(expected.split()) == set(shown)
    assert ("next-use", "bmoe_plugins.caches.next_use", "auto", made.budget.bytes) == tuple(
        shown["cache"][key] for key in ("name", "origin", "budget_requested", "budget_bytes")
    )


def test_builders_are_told_model_budget_and_files():
    facts = plan("cache.budget_mb=20", "fetch.lanes=2", "fetch.direct=false", "sampling.seed=5").facts_for_build()

    told, fetch = facts.cache, facts.fetch
    assert (20 * MIB, 20 * MIB // ENTRY, 8, 5) == (told.budget_bytes, told.capacity, told.cycle, told.seed)
    assert (("/models/m.gguf",), 2, False, 8 * 3) == (fetch.paths, fetch.lanes, fetch.direct, fetch.batch)
    assert 2 * 3 == plan("model.ubatch=1").facts_for_build().fetch.batch


# ---- names and options


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("cache.policy=lur", '--set: cache.policy = "lur" is not a cache policy; did you mean "lru"? (arc, decay,'),
        (
            "fetch.plugin=preed",
            '--set: fetch.plugin = "preed" is not a fetcher; did you mean "pread"? (aio, pread, uring)',
        ),
        (
            "dense.placement=auto",
            '--set: dense.placement = "auto" is not possible; choose one of ahwb, anon, locked, mmap, repack, warm',
        ),
        ("sink.0.plugin=jsnl", '--set: sink.0.plugin = "jsnl" is not a sink; did you mean "jsonl"? (csv, jsonl,'),
        (
            "cache.policy=umbra.hotset",
            '--set: cache.policy = "umbra.hotset" is not a cache policy of bmoe; add "umbra" to plugins.enable',
        ),
        (
            "cache.policy=ghost.x",
            '--set: cache.policy = "ghost.x" is not a cache policy of bmoe, and no plugin "ghost" is',
        ),
        (
            "cache.options.k=3",
            "--set: cache.options.k = 3 is not a key of [cache.options]; choose one of half_life",
        ),
        (
            'dense.options={"a b" = 1}',
            '--set: dense.options."a b" = 1 is not a key of [dense.options]; remove it',
        ),
    ],
)
def test_a_bad_name_or_option_is_one_line(override, expected):
    (line,) = refused(override)

    assert line.startswith(expected)


class Tuning(Options):
    """Options with most ways to be wrong."""

    k: int = Field(4, ge=1, le=9)
    rate: float = Field(0.5, gt=0)
    mode: str = "a"
    both: int | None = None

    @field_validator("mode")
    @classmethod
    def _mode(cls, value):
        if value == "boom":
            raise KeyError("not a ValueError")
        if value == "z":
            raise ValueError("must not be z; choose a")
        return value


def test_options_are_checked_by_the_provider_and_its_refusals_carry_the_toml_path():
    lines = refused(
        cache={"policy": "mine", "options": {"k": 0, "rate": "x", "mode": "z", "both": "y", "kk": 1}},
        providers=[cache(options=Tuning)],
    )

    assert {
        "profile: cache.options.k = 0 is too small; give at least 1",
        'profile: cache.options.rate = "x" is not a number; give a number',
        'profile: cache.options.mode = "z" must not be z; choose a',
        'profile: cache.options.both = "y" is not a whole number; give a whole number',
        'profile: cache.options.kk = 1 is not a key of [cache.options]; did you mean "k"? (both, k, mode, rate)',
    } == set(lines)


def test_a_validator_that_crashes_is_a_problem_and_not_a_traceback():
    (line,) = refused(cache={"policy": "mine", "options": {"mode": "boom"}}, providers=[cache(options=Tuning)])

    assert line.startswith('profile: cache.options = {mode = "boom"} cannot be checked by cache "mine"; correct')


def test_validated_options_reach_the_choice():
    made = plan(cache={"policy": "mine", "floor_mb": 0, "options": {"k": 7}}, providers=[cache(options=Tuning)])

    assert Tuning(k=7) == made.cache.options


def test_an_experimental_plugin_must_be_allowed():
    experimental = cache(experimental=True)

    (line,) = refused(cache={"policy": "mine"}, providers=[experimental])
    made = plan("plugins.allow_experimental=true", cache={"policy": "mine"}, providers=[experimental])

    assert line == 'profile: cache.policy = "mine" is experimental; set plugins.allow_experimental = true to try it'
    assert made.experimental
    assert made.resolved()["experimental"]


def test_a_lossy_plugin_marks_the_plan():
    made = plan(cache={"policy": "mine"}, providers=[cache(lossy=True)])

    assert made.lossy
    assert made.resolved()["cache"]["lossy"]


NO_URING = ("fetch", Provider("uring", lambda options, facts: None, available=lambda: "no ring"))


def test_a_plugin_that_this_machine_cannot_run_is_refused_by_name_and_skipped_by_auto():
    absent = fetch("aio", available=lambda: "the system has no AIO")

    (line,) = refused("fetch.plugin=aio", providers=[absent])
    made = plan("fetch.plugin=auto", providers=[absent, NO_URING])

    assert line.startswith('--set: fetch.plugin = "aio" cannot run here: the system has no AIO; choose another')
    assert "pread" == made.fetch.name


def test_auto_prefers_the_first_that_can_run_and_says_why_none_can():
    assert "aio" == plan("fetch.plugin=auto", providers=[fetch("aio")]).fetch.name

    lines = refused(
        "fetch.plugin=auto",
        providers=[fetch("aio", available=lambda: "no AIO"), NO_URING, fetch("pread", available=lambda: 1 / 0)],
    )

    assert (
        '"auto" finds nothing that can run here (aio: no AIO; uring: no ring; pread: it cannot tell (ZeroDivisionError'
        in lines[0]
    )


def test_auto_avoids_what_a_named_plugin_excludes_or_does_not_need():
    picky, needy = cache(excludes=("fetch:aio",)), cache(needs=("fetch:pread",))

    for choice in (picky, needy):
        made = plan("fetch.plugin=auto", cache={"policy": "mine"}, providers=[choice, fetch("aio"), NO_URING])
        assert "pread" == made.fetch.name


def test_impossible_combinations_follow_from_what_plugins_declare():
    lines = refused(
        cache={"policy": "mine"},
        providers=[
            cache(excludes=("fetch:pread", "dense:*", "arch:qwen3moe"), needs=("prefetch:*", "sink:jsonl")),
            fetch("pread", excludes=("cache:mine",)),
        ],
    )

    assert [
        'profile: cache.policy = "mine" needs prefetch:*; choose it, or another cache plugin',
        'profile: cache.policy = "mine" needs sink:jsonl; choose it, or another cache plugin',
        'profile: cache.policy = "mine" cannot run with fetch.plugin = "pread"; change one of them',
        'profile: cache.policy = "mine" cannot run with dense.placement = "mmap"; change one of them',
        'profile: cache.policy = "mine" cannot run with arch:qwen3moe; change one of them',
    ] == lines


def test_needs_that_are_met_are_no_problem():
    needy = cache(needs=("sink:*", "fetch:pread"))

    assert "mine" == plan("sink.0.plugin=progress", cache={"policy": "mine"}, providers=[needy]).cache.name


def test_every_reason_of_every_stage_is_reported_at_once():
    lines = refused(
        "sink.0.plugin=nope",
        "stream.overlap=expert",
        "model.repack=true",
        cache={"policy": "lur"},
        facts=replace(FACTS, arch="qwen3mo"),
        chat={"think": True},
    )

    assert 6 == len(lines)
    assert any('model.path: architecture "qwen3mo" has no row; did you mean "qwen3moe"?' in line for line in lines)


def test_a_plugins_own_check_can_refuse_a_plan():
    class Objector:
        def __init__(self):
            self.answer = ["cache.budget_mb is too odd; make it even"]

        @hookimpl
        def bmoe_check_plan(self, plan):
            assert plan.cache.name == "next-use"
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    objector = Objector()
    profile = load_profile({"fetch": {"plugin": "pread"}})
    catalog = load_plugins(profile, load_registry())
    catalog.manager.register(objector, "objector")

    with pytest.raises(ProfileError, match=r"^profile: cache\.budget_mb is too odd; make it even$"):
        make_plan(profile, catalog, FACTS, MACHINE)
    for bad in ("a text", RuntimeError("no idea")):
        objector.answer = bad
        with pytest.raises(PluginError, match="objector: bmoe_check_plan failed; correct the plugin"):
            make_plan(profile, catalog, FACTS, MACHINE)


# ---- settings that do not go together; what this version does not do is in test_undriven.py


def test_repacked_weights_are_refused_with_streaming_only():
    assert "set stream.enabled = false" in refused("model.repack=true")[0]
    assert not plan("model.repack=true", "stream.enabled=false").streaming


def test_a_quantised_kv_needs_flash_attention():
    assert "needs flash attention" in refused("model.kv_type=q8_0", "model.flash_attention=false")[0]
    assert "q8_0" == plan("model.kv_type=q8_0").profile.model.kv_type


def test_without_streaming_nothing_is_cached_and_no_fetcher_has_to_run():
    absent = fetch("aio", available=lambda: "the system has no AIO")

    made = plan("stream.enabled=false", "fetch.plugin=aio", "cache.budget_mb=1", providers=[absent])

    shown = made.resolved()
    assert (0, False, False) == (made.budget.bytes, shown["cache"]["used"], shown["fetch"]["used"])


def test_a_context_longer_than_the_training_is_a_notice():
    assert ("model.ctx is 5000, but the model was trained for 4096",) == plan("model.ctx=5000").notices


# ---- the cache's budget: its rules are tested in test_budget.py


def test_a_budget_that_cannot_be_used_is_refused_with_its_path_and_the_number_that_is_needed():
    need = math.ceil(CYCLE / MIB)

    (line,) = refused("cache.budget_mb=3", "cache.policy=lru")

    expected = "--set: cache.budget_mb = 3 is below what one token uses (8 experts), so that lru would never hit; "
    assert line == f"{expected}give at least {need}, or 0 to turn the cache off"
    assert need * MIB == plan(f"cache.budget_mb={need}", "cache.policy=lru").budget.bytes


def test_the_policy_itself_is_asked_whether_it_hits_below_the_cycle():
    tables = {"cache": {"policy": "mine", "budget_mb": 3}}

    assert 3 * MIB == plan(providers=[cache(below_cycle=True)], **tables).budget.bytes
    assert refused(providers=[cache(below_cycle=False)], **tables)
    assert 3 * MIB == plan(cache={"policy": "umbra.hotset", "budget_mb": 3}, plugins={"enable": ["umbra"]}).budget.bytes


def test_a_policy_that_cannot_even_be_built_is_a_problem_with_its_path():
    broken = ("cache", Provider("mine", lambda options, facts: 1 / 0))

    (line,) = refused(cache={"policy": "mine", "budget_mb": 3}, providers=[broken])

    assert line.startswith('profile: cache.policy = "mine" cannot be built; correct it (ZeroDivisionError')


@pytest.mark.parametrize("name", ["phone-near-ram", "phone-far-past-ram", "desktop-over-ram", "resident", "demo"])
def test_every_bundled_profile_makes_a_plan(name):
    profile = load_profile(name, overrides=["cache.budget_mb=64"] if name == "demo" else [])  # its own model is small
    catalog = load_plugins(profile, load_registry())

    made = make_plan(profile, catalog, FACTS, replace(MACHINE, available_bytes=4096 * MIB))

    assert f"{name}.toml" == made.resolved()["profile"]
