"""registry.toml lists what is in the tree, and nothing else; a damaged one is refused with every problem."""

from __future__ import annotations

import importlib

import pytest

from bmoe.errors import PluginError
from bmoe.plugins import load_all
from bmoe.registry import AUTO, KINDS, load_registry, parse_registry, read_registry

ROW = {"kind": "cache", "name": "lru", "module": "bmoe_plugins.caches.lru", "stability": "stable", "docs": "d.md"}


def refused(rows):
    with pytest.raises(PluginError) as caught:
        parse_registry({"plugin": rows})
    return str(caught.value).splitlines()


def test_every_file_under_plugins_has_a_row_and_every_row_a_file(root):
    files = {
        f"bmoe_plugins.{path.parent.name}.{path.stem}"
        for path in (root / "plugins").glob("*/*.py")
        if not path.stem.startswith("_")
    }

    assert files == {row.module for row in load_registry().rows}


def test_every_row_names_what_its_module_provides():
    """load_all compares each module with its rows, in both directions."""
    registry = load_registry()
    catalog = load_all(registry)

    rows = [row for row in registry.rows if row.kind != "arch"]
    loaded = {(kind, name) for kind, providers in catalog.providers.items() for name in providers}
    assert loaded == {(row.kind, row.name) for row in rows}
    assert all(catalog.origin(row.kind, row.name) == row.module for row in rows)


def test_every_architecture_comes_from_the_table():
    registry = load_registry()
    catalog = load_all(registry)

    assert dict(catalog.archs) == {row.name: row for row in registry.archs}
    assert {catalog.origin("arch", name) for name in catalog.archs} == {"bmoe_plugins.archs.table"}
    names = [row.name for row in registry.archs]
    assert names == sorted(names), "a table is read by name: keep it sorted"


def test_every_row_names_existing_gates():
    gates = importlib.import_module("bmoe.testing")

    assert [] == [g for row in load_registry().rows for g in row.gates if not hasattr(gates, g)]


def test_every_row_names_an_existing_page(root):
    assert [] == [row.docs for row in load_registry().rows if not (root / row.docs.partition("#")[0]).is_file()]


def test_the_installed_registry_is_the_one_at_the_root(root):
    assert (root / "registry.toml").read_bytes() == (root / "plugins" / "registry.toml").read_bytes()
    assert read_registry(root / "registry.toml") == load_registry()


def test_what_auto_tries_is_in_the_tree():
    registry = load_registry()

    assert [] == [(kind, name) for kind, names in AUTO.items() for name in names if registry.find(kind, name) is None]


def test_a_name_that_is_listed_twice_is_refused_naming_both_modules():
    other = {**ROW, "module": "bmoe_plugins.caches.other"}

    (line,) = refused([ROW, other])

    expected = 'registry.toml: cache "lru" is listed twice, as bmoe_plugins.caches.lru and bmoe_plugins.caches.other'
    assert line.startswith(expected)


def test_one_name_in_two_kinds_is_allowed():
    registry = parse_registry({"plugin": [ROW, {**ROW, "kind": "fetch", "name": "lru"}]})

    assert (("lru",), ("lru",)) == (registry.names("cache"), registry.names("fetch"))


def test_an_unknown_kind_is_refused_with_did_you_mean():
    (line,) = refused([{**ROW, "kind": "cachee"}])

    assert line.startswith('registry.toml: plugin.0.kind = "cachee" is not a choice here; did you mean "cache"? (arch,')
    assert all(kind in line for kind in KINDS)


def test_all_problems_of_a_registry_are_reported_at_once():
    lines = refused([{**ROW, "stability": "shaky", "color": 1}, {"kind": "cache"}, {**ROW, "module": "os.path"}])

    assert any("plugin.0.stability" in line for line in lines)
    assert any("plugin.0.color = 1 is not a key" in line for line in lines)
    assert any("plugin.1.name is missing; give the name that a profile says" in line for line in lines)
    assert any("plugin.2.module" in line for line in lines)


def test_a_registry_that_is_no_toml_is_refused(tmp_path):
    (tmp_path / "registry.toml").write_text("[[plugin", encoding="utf-8")

    with pytest.raises(PluginError, match=r"registry\.toml: line 1, column"):
        read_registry(tmp_path / "registry.toml")
