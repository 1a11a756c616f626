"""``bmoe profile``: what it says of problems, and how it prints a plan."""

from __future__ import annotations

import json

import pytest

from bmoe.cli.profile import toml_lines
from bmoe.synth import write_model
from bmoe.tables import parse_toml

COMMAND = "profile"


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("profile") / "tiny.gguf", "tiny-qwen3moe", layers=1, sparse=True))


@pytest.mark.parametrize("settings", [["cache.polcy=lru", "fetch.plugin=preed"], ["plugins.enable=['nobody']"]])
def test_problems_are_in_the_json_and_on_stderr_alike(bmoe, settings):
    code, out, err = bmoe("check", "demo", "--json", *(f"--set={each}" for each in settings))
    report = json.loads(out)

    assert (2, "demo.toml", None) == (code, report["profile"], report["resolved"])
    assert [f"bmoe: {line}" for line in report["problems"]] == err.splitlines()


def test_a_profile_that_cannot_be_read_is_json_too(bmoe):
    code, out, _ = bmoe("check", "dmo", "--json")

    assert (2, "dmo", 1) == (code, json.loads(out)["profile"], len(json.loads(out)["problems"]))


def test_a_model_that_cannot_be_used_is_json_and_1(bmoe, tmp_path):
    code, out, _ = bmoe("check", "demo", "--json", "--model", str(tmp_path / "none.gguf"))

    assert 1 == code
    assert "none.gguf" in json.loads(out)["problems"][0]


def test_without_a_problem_the_list_is_empty(bmoe):
    assert [] == json.loads(bmoe("check", "demo", "--json")[1])["problems"]


def test_show_reports_the_problems_that_check_does(bmoe, tmp_path):
    path = tmp_path / "p.toml"
    path.write_text('[cache]\npolicy = "lur"\nbudget_mb = "many"\n[[sink]]\nplugin = "jsonl"\n')
    checked, shown = bmoe("check", str(path)), bmoe("show", str(path))

    assert 3 == checked[2].count("\n")
    assert checked == shown


def test_a_model_that_is_missing_does_not_keep_a_profile_from_being_shown(bmoe, tmp_path):
    code, out, err = bmoe("show", "demo", "--model", str(tmp_path / "none.gguf"))

    assert (0, "") == (code, err)
    assert str(tmp_path / "none.gguf") == parse_toml(out, "shown")["model"]["path"]


def test_the_listing_of_a_plan_is_toml_with_readable_sizes(bmoe, model):
    code, out, _ = bmoe("check", "demo", "--model", model)
    first, _, listing = out.partition("\n")
    resolved = json.loads(bmoe("check", "demo", "--model", model, "--json")[1])["resolved"]
    read = parse_toml(listing, "listing")

    assert (0, f"demo.toml: no problem found with {model}") == (code, first)
    assert resolved["cache"]["budget_bytes"] == read["cache"]["budget_bytes"]
    assert {key for key, value in resolved.items() if value not in (None, [])} == set(read)
    assert "null" not in listing


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("budget_bytes", 64 << 20, "budget_bytes = 67108864  # 64 MiB"),
        ("cycle_bytes", 960 << 10, "cycle_bytes = 983040  # 960 KiB"),
        ("floor_mb", 1536.0, "floor_mb = 1536.0  # 1.5 GiB"),
        ("ceil_mb", 64.0, "ceil_mb = 64.0"),
        ("budget_mb", "auto", 'budget_mb = "auto"'),
        ("ctx", 4096, "ctx = 4096"),
    ],
)
def test_a_size_has_its_unit_in_a_comment(key, value, line):
    assert line in list(toml_lines({"cache": {key: value}}))
