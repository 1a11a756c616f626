"""A TOML file of architecture rows that is wrong is refused with all of its problems, in its own words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bmoe.errors import PluginError
from bmoe.plugins import load_plugins
from bmoe.profile import load_profile
from bmoe.registry import load_registry
from bmoe.rows import gather_rows, read_rows

GOOD = '[[arch]]\nname = "umbramoe"\nexperts = [["ffn_up_exps", "ffn_down_exps"]]\n'


@pytest.fixture(name="write")
def _write(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "rows.toml"
        path.write_text(text)
        return str(path)

    return write


def refused(path: str) -> list[str]:
    with pytest.raises(PluginError) as caught:
        read_rows(path)
    return [line.replace(f"{path}: ", "") for line in str(caught.value).splitlines()]


def test_a_stray_key_is_told_the_form_of_the_file(write):
    (line,) = refused(write(f"x = 1\n{GOOD}"))

    assert line == "x = 1 is not a key of a file of rows, each written as [[arch]]; choose one of arch"


def test_a_key_of_a_row_outside_of_one_is_told_where_it_belongs(write):
    (line,) = refused(write(f'gating = "sigmoid"\n{GOOD}'))

    assert line.endswith("; it belongs to [[arch]]")


def test_a_misspelt_name_is_also_reported_as_missing(write):
    lines = refused(write('[[arch]]\nnam = "a"\nexperts = [["b_exps"]]\n'))

    assert 2 == len(lines)
    assert lines[0].startswith('arch.0.nam = "a" is not a key of [arch.0]; did you mean "name"?')
    assert "arch.0.name is missing; give the gguf's general.architecture" == lines[1]


def test_a_missing_name_is_reported_once(write):
    assert ["arch.0.name is missing; give the gguf's general.architecture"] == refused(
        write('[[arch]]\nexperts = [["b_exps"]]\n')
    )


def test_rows_beside_a_wrong_one_are_kept_and_the_wrong_one_claims_its_name(write):
    rows, problems = gather_rows(write(f'{GOOD}[[arch]]\nname = "b"\nexperts = []\n'))

    assert [("umbramoe", True), ("b", False)] == [(row.name, bool(row.experts)) for row in rows]
    assert 1 == len(problems)


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (f'{GOOD}x = 1\n[[arch]]\nname = "qwen3moe"\nexperts = [["b_exps"]]\n', "arch.0.x = 1"),
        ('[[arch]]\nname = "qwen3moe"\nexperts = [["b_exps"]]\ngating = "softmx"\n', 'arch.0.gating = "softmx"'),
        ('[[arch]]\nname = "qwen3moe"\nexperts = [["b_exps", "b_exps"]]\n', "an expert tensor is listed twice"),
    ],
    ids=["in another row", "in the same row", "in what it lists"],
)
def test_a_name_that_is_taken_is_reported_with_the_other_problems(write, rows, wrong):
    path = write(rows)
    with pytest.raises(PluginError) as caught:
        load_plugins(load_profile({"plugins": {"archs": [path]}}), load_registry())
    lines = str(caught.value).splitlines()

    assert 2 == len(lines)
    assert wrong in lines[0]
    assert lines[1].startswith('arch "qwen3moe" is provided by bmoe_plugins.archs.table and ')
    assert lines[1].endswith('; to take its place, say replaces = "qwen3moe" in the second')


def test_a_wrong_row_that_says_what_it_replaces_takes_no_name(write):
    path = write('[[arch]]\nname = "qwen3moe"\nreplaces = "qwen3moe"\nexperts = [["b_exps"]]\nx = 1\n')
    with pytest.raises(PluginError) as caught:
        load_plugins(load_profile({"plugins": {"archs": [path]}}), load_registry())

    assert 1 == len(str(caught.value).splitlines())
