"""Plugins load only when named, in a fresh manager; whatever is wrong with one is an error in one line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bmoe import ArchRow
from bmoe.errors import PluginError
from bmoe.plugins import installed_plugins, load_all, load_plugins
from bmoe.profile import load_profile
from bmoe.registry import AUTO, load_registry, parse_registry


@pytest.fixture(name="umbra", autouse=True)
def _umbra(monkeypatch):
    """Make the fake distribution in this folder look installed, and forget its modules afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "umbra"]:
        del sys.modules[name]


def load(*overrides, registry=None, **tables):
    return load_plugins(load_profile(tables, overrides=overrides), registry or load_registry())


def refused(*overrides, registry=None, **tables):
    with pytest.raises(PluginError) as caught:
        load(*overrides, registry=registry, **tables)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def enabled(name):
    return {"plugins": {"enable": [name]}}


def test_only_what_the_profile_names_is_imported():
    before = set(sys.modules) - {"bmoe_plugins.caches.none", "bmoe_plugins.fetch.aio", "bmoe_plugins.sinks.jsonl"}
    for name in set(sys.modules) - before:
        del sys.modules[name]

    catalog = load("cache.policy=lru", "fetch.plugin=pread")

    assert [["lru"], ["pread"], ["mmap"], []] == [
        list(catalog.providers[kind]) for kind in ("cache", "fetch", "dense", "sink")
    ]
    assert not {"bmoe_plugins.caches.none", "bmoe_plugins.fetch.aio", "bmoe_plugins.sinks.jsonl"} & set(sys.modules)
    assert "umbra.plugin" not in sys.modules


def test_auto_loads_its_candidates_and_all_rows_are_there():
    catalog = load()

    assert set(AUTO["cache"]) == set(catalog.providers["cache"])
    assert {"aio", "pread", "uring"} == set(catalog.providers["fetch"])
    assert {"qwen3moe", "gpt-oss"} <= set(catalog.archs)
    assert catalog.origin("cache", "lru") == "bmoe_plugins.caches.lru"


def test_every_open_has_a_manager_of_its_own():
    first, second = load(), load()

    assert first.manager is not second.manager
    assert "umbra.hotset" in load(**enabled("umbra")).providers["cache"]
    assert "umbra.hotset" not in load().providers["cache"]


def test_an_installed_plugin_is_found_by_its_entry_point_and_loads_when_enabled():
    assert "umbra" in installed_plugins()

    catalog = load(**enabled("umbra"))

    assert "umbra.hotset" in catalog.providers["cache"]
    assert "umbra.counter" in catalog.providers["sink"]
    assert catalog.archs["umbra-moe"].gating == "sigmoid"
    assert catalog.origin("arch", "umbra-moe") == catalog.origin("cache", "umbra.hotset") == "umbra"


def test_everything_in_tree_can_be_loaded_for_listings():
    registry = load_registry()

    catalog = load_all(registry, ["umbra"])

    assert {"none", "lru", "umbra.hotset"} <= set(catalog.providers["cache"])
    assert {row.name for row in registry.archs} < set(catalog.archs)


def test_a_plugin_that_is_not_installed_is_refused_with_the_installed_ones():
    (line,) = refused(**enabled("umbrae"))

    assert line.startswith('profile: plugins.enable names "umbrae", which is not installed; did you mean "umbra"? (')
    assert "umbra, umbra-argument, " in line


def test_a_plugin_that_cannot_be_imported_says_the_remedy_first_and_keeps_the_cause():
    with pytest.raises(PluginError) as caught:
        load(**enabled("umbra-broken"))

    assert str(caught.value).startswith(
        'repair bmoe-umbra 0.1 (pip install --force-reinstall) or remove "umbra-broken" from plugins.enable: '
        "umbra.broken cannot be imported (ModuleNotFoundError: No module named 'a_package_that_is_not_installed')"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_an_in_tree_module_that_cannot_be_imported_is_an_error():
    rows = [*_rows(), {**_rows()[0], "kind": "cache", "name": "ghost", "module": "bmoe_plugins.caches.ghost"}]

    (line,) = refused("cache.policy=ghost", registry=parse_registry({"plugin": rows}))

    assert line.startswith("reinstall bmoe or choose another plugin: bmoe_plugins.caches.ghost cannot be imported (")


def _rows():
    return [row.model_dump() for row in load_registry().rows]


def test_a_row_that_takes_a_name_of_bmoe_is_refused_naming_both_unless_it_replaces_it():
    lines = refused(**enabled("umbra-clash"))

    expected = 'arch "qwen3moe" is provided by bmoe_plugins.archs.table and umbra-clash (umbra.clash); '
    assert [line for line in lines if line.startswith(expected) and 'replaces = "qwen3moe"' in line]
    assert (("ffn_up_exps",),) == load(**enabled("umbra-replaces")).archs["qwen3moe"].experts


def test_a_provider_name_that_is_given_twice_is_refused_naming_its_module():
    lines = refused(**enabled("umbra-clash"))

    assert 'cache "umbra-clash.one" is provided by umbra-clash (umbra.clash) twice; remove or rename one' in lines


def test_two_in_tree_modules_with_one_name_are_refused_naming_both(monkeypatch):
    again = ModuleType("bmoe_plugins.caches.lru_again")
    again.bmoe_caches = importlib.import_module("bmoe_plugins.caches.lru").bmoe_caches
    monkeypatch.setitem(sys.modules, again.__name__, again)
    rows = [*_rows(), {**_rows()[0], "kind": "cache", "name": "lru_again", "module": again.__name__}]

    with pytest.raises(PluginError, match=r"provided by bmoe_plugins\.caches\.lru and bmoe_plugins\.caches\.lru_again"):
        load_all(parse_registry({"plugin": rows}))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "umbra-pending",
            'umbra-pending (umbra.pending): "bmoe_cachez" is not a hook of bmoe; did you mean "bmoe_caches"?',
        ),
        ("umbra-argument", "umbra-argument (umbra.argument): cannot be registered; correct it ("),
        ("umbra-unmarked", "umbra-unmarked (umbra.unmarked): bmoe_caches is not marked; put @bmoe.hookimpl above it"),
        (
            "umbra-unprefixed",
            'umbra-unprefixed (umbra.unprefixed): cache "hotset" lacks the prefix of its plugin; name it "umbra-unpref',
        ),
        (
            "umbra-raises",
            "umbra-raises (umbra.raising): bmoe_caches failed; correct the plugin or leave it out (RuntimeError: out",
        ),
    ],
)
def test_a_plugin_that_breaks_the_contract_is_one_line(name, expected):
    (line,) = refused(**enabled(name))

    assert line.startswith(expected)


def test_an_unknown_argument_names_the_argument():
    assert "'budget'" in refused(**enabled("umbra-argument"))[0]


def test_everything_wrong_with_a_plugin_is_reported_at_once():
    expected = [
        'row "odd-moe": experts is not a list of lists of names, one per bank; give at least one',
        "bmoe_caches returned 'lru', which is no Provider; return bmoe.Provider(…)",
        'cache "umbra-odd.x": options is no model of options; derive it from bmoe.contracts.Options',
        'cache "umbra-odd.y": "disk" names no plugin; write "kind:name" or "kind:*"',
        "bmoe_sinks failed; correct the plugin or leave it out (TypeError: it returned {'umbra-odd.z'",
    ]

    lines = refused(**enabled("umbra-odd"))

    assert len(expected) == len(lines)
    for text, line in zip(expected, lines, strict=True):
        assert line.startswith(f"umbra-odd (umbra.odd): {text}")


def test_a_module_that_disagrees_with_the_registry_is_refused():
    rows = [{**row, "name": "lruu"} if row["name"] == "lru" else row for row in _rows()]

    lines = refused("cache.policy=lruu", registry=parse_registry({"plugin": rows}))

    assert [
        'registry.toml: bmoe_plugins.caches.lru is not listed with cache "lru"; make the two agree',
        'registry.toml: bmoe_plugins.caches.lru does not provide cache "lruu"; make the two agree',
    ] == lines


def rows_file(folder, text):
    (folder / "rows.toml").write_text(text, encoding="utf-8")
    return {"plugins": {"archs": [str(folder / "rows.toml")]}}


def test_a_toml_file_adds_rows(tmp_path):
    tables = rows_file(
        tmp_path,
        '[[arch]]\nname = "mine"\nexperts = [["ffn_gate_up_exps", "ffn_down_exps"]]\ngating = "sigmoid"\n'
        'has = ["selection_bias"]\nnotes = "n"\n[[arch]]\nname = "qwen3moe"\nexperts = [["a"]]\n'
        'replaces = "qwen3moe"\n',
    )

    catalog = load(**tables)

    expected = ArchRow(
        "mine", (("ffn_gate_up_exps", "ffn_down_exps"),), gating="sigmoid", has=("selection_bias",), notes="n"
    )
    assert expected == catalog.archs["mine"]
    assert (("a",),) == catalog.archs["qwen3moe"].experts
    assert catalog.origin("arch", "mine") == str(tmp_path / "rows.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[[arch]]\ngating = "softmax"\n', "arch.0.name is missing; give the gguf's general.architecture"),
        ('[[arch]]\nname = "m"\nexperts = ["a"]\n', 'arch.0.experts.0 = "a" is not a list; write it in [ ]'),
        (
            '[[arch]]\nname = "m"\nexperts = [["a"]]\ngatng = "x"\n',
            'arch.0.gatng = "x" is not a key of [arch.0]; did you',
        ),
        ('[[arch]]\nname = "m"\nexperts = [["a"]]\ngating = "sigmoyd"\n', 'did you mean "sigmoid"?'),
        ('[arch]\nname = "m"\n', "is not a list; write each as [[arch]]"),
        ("", "arch is missing; give the rows, each as [[arch]]"),
        ("[[arch", "line 1, column 7"),
        ('[[arch]]\nname = "m"\nexperts = []\n', "experts is not a list of lists"),
        ('[[arch]]\nname = "m"\nexperts = [["a", "a"]]\n', "an expert tensor is listed twice"),
        ('[[arch]]\nname = "gpt-oss"\nexperts = [["a"]]\n', 'arch "gpt-oss" is provided by bmoe_plugins.archs.table'),
        (
            '[[arch]]\nname = "m"\nexperts = [["a"]]\nreplaces = "gptoss"\n',
            'is no row of bmoe; did you mean "gpt-oss"?',
        ),
        ('[[arch]]\nname = "m"\nexperts = [["a"]]\nreplaces = "gpt-oss"\n', "is not its own name"),
    ],
)
def test_a_bad_rows_file_is_refused_naming_file_and_key(tmp_path, text, expected):
    lines = refused(**rows_file(tmp_path, text))

    assert any("rows.toml" in line and expected in line for line in lines), lines


def test_a_rows_file_that_is_missing_names_the_profile_and_the_file(tmp_path):
    (line,) = refused(plugins={"archs": [str(tmp_path / "none.toml")]})

    assert line == f"profile: plugins.archs.0: {tmp_path}/none.toml: no such file; check the path"
