"""Binding builds every chosen plugin once; from then on plain objects run, and pluggy is not called again."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest

from bmoe import (
    BankFacts,
    ModelFacts,
    NativeError,
    PluginError,
    ProjectionFacts,
    Provider,
    ReadError,
    RunRecord,
    ShardFacts,
    TokenRecord,
    expert_key,
)
from bmoe.bind import bind
from bmoe.machine import Machine
from bmoe.planner import make_plan
from bmoe.plugins import load_plugins
from bmoe.profile import load_profile
from bmoe.registry import load_registry

MIB = 1 << 20
MACHINE = Machine(2, 4096, 512 * MIB, "Linux", "6", "x86_64", None)
PROJECTION = ProjectionFacts("blk.0.ffn_up_exps.weight", "ffn_up_exps", 0, 0, 100_000, "q4_0")
FACTS = ModelFacts(
    path="m.gguf",
    name="m",
    arch="umbra-moe",
    shards=(ShardFacts("m.gguf", 10 * MIB),),
    n_layer=1,
    n_expert=8,
    n_used=2,
    n_embd=8,
    n_vocab=10,
    n_ctx_train=0,
    n_nextn=0,
    banks=(BankFacts(0, 0, 8, 2, (PROJECTION,)),),
    dense=(),
)


@pytest.fixture(name="umbra", autouse=True)
def _umbra(monkeypatch):
    """Make the fake distribution in this folder look installed, and forget its modules afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "umbra"]:
        del sys.modules[name]


class Resource:
    """A fetcher and a placement that remember whether they were closed."""

    direct, note = False, ""

    def __init__(self):
        self.closed = 0

    def submit(self, reads, /): ...

    def wait(self, ticket, upto, /): ...

    def ready(self, ticket, upto, /): ...

    def cancel(self, ticket, /): ...

    def place(self, tensors, /): ...

    def close(self):
        self.closed += 1


@pytest.fixture(name="world")
def _world():
    """A plan of umbra's plugins with fakes for what opens files; ``world.builds`` replaces what providers build."""
    world = SimpleNamespace(fetcher=Resource(), dense=Resource(), builds={}, built=[])

    def provider(kind, name, result):
        def build(options, facts):
            world.built.append(kind)
            made = world.builds.get(kind, result)
            if isinstance(made, Exception):
                raise made
            return made

        return Provider(name, build)

    def plan(*overrides):
        tables = {
            "plugins": {"enable": ["umbra"]},
            "cache": {"policy": "umbra.hotset", "floor_mb": 0},
            "fetch": {"plugin": "pread"},
            "sink": [{"plugin": "umbra.counter"}],
        }
        profile = load_profile(tables, overrides=overrides)
        catalog = load_plugins(profile, load_registry())
        providers = {kind: dict(table) for kind, table in catalog.providers.items()}
        providers["fetch"]["pread"] = provider("fetch", "pread", world.fetcher)
        providers["dense"]["mmap"] = provider("dense", "mmap", world.dense)
        if "cache" in world.builds:
            providers["cache"]["umbra.hotset"] = provider("cache", "umbra.hotset", None)
        world.catalog = replace(catalog, providers=MappingProxyType(providers))
        return make_plan(profile, world.catalog, FACTS, MACHINE)

    world.plan = plan
    return world


def test_no_hook_is_called_after_binding(world):
    """With pluggy armed to raise on any hook call, policies and sinks work as they do in a run."""
    hot = bind(world.plan())

    def tripwire(name, *_):
        raise AssertionError(f"{name} was called after binding")

    manager = world.catalog.manager
    manager.add_hookcall_monitoring(tripwire, lambda *_: None)
    with pytest.raises(AssertionError, match="bmoe_caches was called after binding"):
        manager.hook.bmoe_caches()

    first, second = expert_key(0, 1), expert_key(0, 2)
    for key in (first, second, second):
        hot.policy.touch((key,))
        hot.policy.admit(key, False)
    assert second == hot.policy.victim({first})
    hot.policy.forget(second)
    assert first == hot.policy.victim(())
    (sink,) = hot.sinks
    sink.open(RunRecord("id", "m", "umbra-moe", {}, {}, {}, {}))
    sink.token(TokenRecord(0, 5, "x"))
    sink.close(None)
    assert 1 == sink.tokens


def test_each_plugin_is_built_once(world):
    hot = bind(world.plan())

    assert ["fetch", "dense"] == world.built
    assert (world.fetcher, world.dense) == (hot.fetcher, hot.dense)
    assert type(hot.policy).__name__ == "Hotset"


def test_with_the_cache_off_no_policy_is_built(world):
    world.builds["cache"] = RuntimeError("must not be built")

    hot = bind(world.plan("cache.budget_mb=0"))

    hot.policy.touch((1,))
    hot.policy.admit(1, False)
    assert hot.policy.victim(()) is None


def test_without_streaming_no_fetcher_is_built_and_a_read_is_refused(world):
    hot = bind(world.plan("stream.enabled=false"))

    assert ["dense"] == world.built
    assert (False, "nothing is streamed") == (hot.fetcher.direct, hot.fetcher.note)
    with pytest.raises(NativeError, match=r"stream\.enabled is false"):
        hot.fetcher.submit([])


def test_a_build_that_raises_names_provider_and_toml_path_and_keeps_the_cause(world):
    world.builds["fetch"] = KeyError("lanes\nmissing")

    with pytest.raises(PluginError) as caught:
        bind(world.plan())

    expected = 'profile: fetch.plugin = "pread" cannot be built; correct its options or the plugin (KeyError: '
    assert str(caught.value).startswith(expected)
    assert 1 == len(str(caught.value).splitlines())
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_plugin_that_refuses_an_option_gets_the_place_of_that_option(world):
    world.builds["fetch"] = PluginError('options.path = "x": No such file; name another')

    with pytest.raises(PluginError, match=r'^profile: fetch\.options\.path = "x": No such file; name another$'):
        bind(world.plan())


def test_any_other_refusal_of_a_plugin_names_its_provider(world):
    world.builds["fetch"] = PluginError("optional parts lack")

    with pytest.raises(PluginError, match=r'^profile: fetch\.plugin = "pread" cannot be built; .*optional parts lack'):
        bind(world.plan())


def test_an_option_that_an_override_gave_is_blamed_on_it(tmp_path, world):
    path = tmp_path / "none" / "run.jsonl"

    with pytest.raises(PluginError) as caught:
        bind(world.plan("sink.1.plugin=jsonl", f"sink.1.options.path={path}"))

    assert str(caught.value).startswith(f'--set: sink.1.options.path = "{path}": No such file or directory; name a')
    assert caught.value.exit_code == 2


def test_a_file_or_system_that_fails_while_building_surfaces_as_itself(world):
    world.builds["fetch"] = ReadError("m.gguf: cannot be opened")

    with pytest.raises(ReadError, match=r"m\.gguf: cannot be opened"):
        bind(world.plan())


@pytest.mark.parametrize("kind", ["cache", "dense"])
def test_what_was_built_before_a_failure_is_closed(world, kind):
    plan = world.plan()
    broken = Provider("broken", lambda options, facts: 1 / 0)
    plan = replace(plan, **{kind: replace(getattr(plan, kind), provider=broken)})

    with pytest.raises(PluginError):
        bind(plan)

    assert 1 == world.fetcher.closed


def test_an_object_that_lacks_a_method_is_refused_before_it_runs(world):
    world.builds["dense"] = SimpleNamespace(place=None)

    with pytest.raises(PluginError, match=r'dense\.placement = "mmap" builds SimpleNamespace, which lacks close'):
        bind(world.plan())


def test_closing_the_hot_path_closes_fetcher_and_placement_even_if_one_fails(world):
    hot = bind(world.plan())
    hot.close()
    assert (1, 1) == (world.fetcher.closed, world.dense.closed)

    def fail():
        raise OSError("gone")

    world.fetcher.close = fail
    with pytest.raises(OSError, match="gone"):
        hot.close()
    assert 2 == world.dense.closed
