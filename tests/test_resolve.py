"""Every problem of a profile is reported in one pass: its keys, its plugins, their combination and its model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bmoe.errors import ModelError, PluginError, ProfileError
from bmoe.profile import load_profile
from bmoe.resolve import check, resolve
from bmoe.synth import write_model


@pytest.fixture(name="umbra", autouse=True)
def _umbra(monkeypatch):
    """Make the fake distribution in this folder look installed, and forget its modules afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "umbra"]:
        del sys.modules[name]


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("resolve") / "tiny.gguf", "tiny-qwen3moe"))


def refused(profile, error=ProfileError, **arguments):
    with pytest.raises(error) as caught:
        resolve(profile, **arguments)
    assert all(line.isprintable() for line in str(caught.value).splitlines())
    return str(caught.value).splitlines()


EVERYTHING = """
[plugins]
enable = ["umbra-broken"]
[sampling]
temp = "hot"
[[sink]]
plugin = "jsonl"
options = { pth = "x" }
[[sink]]
plugin = "progres"
[stream]
overlap = "expert"
[cache]
polcy = "lru"
budget_mb = 0.001
[fetch]
lanes = 99
plugin = "umbra-broken.x"
"""


def test_keys_types_names_options_plugins_and_budget_are_reported_together_in_the_order_of_the_file(tmp_path, model):
    path = tmp_path / "p.toml"
    path.write_text(EVERYTHING)

    lines = refused(path, model=model, overrides=["draft.max_draft=0", "junk"])

    expected = [
        "repair bmoe-umbra",
        f"{path}: sampling.temp",
        f"{path}: sink.0.options.pth",
        f"{path}: sink.1.plugin",
        f"{path}: stream.overlap",
        f"{path}: cache.polcy",
        f"{path}: cache.budget_mb = 0.001 is below what one token uses",
        f"{path}: fetch.lanes",
        f"{path}: draft.drafter is missing",
        "--set: draft.max_draft",
        '--set "junk": has no value',
    ]
    assert len(expected) == len(lines), lines
    assert [] == [line for line, start in zip(lines, expected, strict=True) if not line.startswith(start)]


def test_a_lacking_model_is_a_problem_of_the_profile_among_the_others():
    assert [
        "profile: model.path is missing; give the model with --model FILE (in Python model=FILE), or set model.path"
    ] == refused({})
    assert 2 == len(refused({"cache": {"policy": "lur"}}))


@pytest.mark.parametrize("table", [{"model": {"path": 3}}, {"model": {"pth": "m"}}, {"modle": {}}, {"path": "m"}])
def test_a_model_whose_key_is_wrong_is_not_lacking_as_well(table):
    (line,) = refused(table)

    assert "is missing" not in line


def test_a_model_that_cannot_be_read_is_reported_once_the_profile_is_right(tmp_path):
    absent = str(tmp_path / "none.gguf")

    (wrong,) = refused({"fetch": {"lanes": 0}}, model=absent)
    (lost,) = refused({"plugins": {"enable": ["umbrae"]}}, PluginError, model=absent)
    (unread,) = refused({}, ModelError, model=absent)

    assert ("fetch.lanes" in wrong, "umbrae" in lost, "none.gguf" in unread) == (True, True, True)


def test_a_plugin_that_fails_and_a_profile_that_is_wrong_do_not_hide_each_other():
    lines = refused(
        {"plugins": {"enable": ["umbra-broken", "umbrae"]}, "model": {"ctx": 0}, "cache": {"policy": "lur"}}
    )

    for text in ("repair bmoe-umbra", "umbrae", "model.ctx = 0", 'cache.policy = "lur"', "model.path is missing"):
        assert 1 == sum(text in line for line in lines), text
    assert 5 == len(lines)


def test_what_a_failed_plugin_would_provide_is_not_unknown_as_well(model):
    (line,) = refused(
        {"plugins": {"enable": ["umbra-broken"]}, "cache": {"policy": "umbra-broken.x"}}, PluginError, model=model
    )

    assert line.startswith("repair bmoe-umbra")


def test_a_failed_plugin_alone_keeps_its_cause(model):
    with pytest.raises(PluginError) as caught:
        resolve({"plugins": {"enable": ["umbra-broken"]}}, model=model)

    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_right_profile_becomes_a_plan(model):
    made = resolve("demo", model=model, overrides=["model.ctx=77"])

    assert (model, 77, "qwen3moe") == (made.facts.path, made.ctx, made.row.name)


def test_a_loaded_profile_takes_model_and_overrides_too(model):
    loaded = load_profile("demo", overrides=["model.ctx=77"])

    made = resolve(loaded, model=model, overrides=["fetch.lanes=2"])
    (line,) = refused(loaded, model=model, overrides=["fetch.lanes=99"])

    assert ("demo.toml", model, 77, 2) == (made.profile.source, made.facts.path, made.ctx, made.lanes)
    assert line.startswith("--set: fetch.lanes = 99")


def test_a_profile_can_be_checked_without_a_model(model):
    profile, plan = check("desktop-over-ram")

    assert ("desktop-over-ram.toml", None) == (profile.source, plan)
    assert check("desktop-over-ram", model=model)[1] is not None


def test_an_option_that_is_lacking_is_blamed_on_who_chose_the_plugin(tmp_path, model):
    path = tmp_path / "p.toml"
    path.write_text('[[sink]]\nplugin = "progress"\n')
    chosen = "sink.0.options.path is missing"

    assert refused(path, model=model, overrides=["sink.0.plugin=jsonl"])[0].startswith(f"--set: {chosen}")
    path.write_text('[[sink]]\nplugin = "jsonl"\n')
    assert refused(path, model=model)[0].startswith(f"{path}: {chosen}")
    assert refused(path, model=model, overrides=["sink.0.options.flush=true"])[0].startswith(f"{path}: {chosen}")


def test_an_option_of_the_file_that_a_plugin_chosen_elsewhere_lacks_is_blamed_on_the_file(tmp_path, model):
    path = tmp_path / "p.toml"
    path.write_text('[[sink]]\nplugin = "progress"\noptions = { window = 4 }\n')
    lines = refused(path, model=model, overrides=["sink.0.plugin=jsonl"])

    assert ["--set: sink.0.options.path", f"{path}: sink.0.options.window"] == sorted(
        line.split(" is ")[0].split(" = ")[0] for line in lines
    )
