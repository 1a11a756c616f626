"""``bmoe gates`` for architectures: rows from a TOML file, and models that are not synthetic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from bmoe.cli.gates import Subject, gate_file
from bmoe.synth import write_model

ROW = '[[arch]]\nname = "{name}"\n{more}experts = [["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]]\n'


@pytest.fixture(autouse=True)
def _fresh_log():
    yield
    structlog.reset_defaults()


COMMAND = "gates"


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    write_model(path, "tiny-qwen3moe")
    return path


@pytest.fixture(name="rows")
def _rows(tmp_path):
    path = tmp_path / "rows.toml"
    path.write_text(ROW.format(name="acme_moe", more=""))
    return path


def test_rows_of_a_file_are_listed_with_the_gates_of_architectures(bmoe, rows):
    _, out, _ = bmoe("--archs", rows, "--list")

    assert [["arch:acme_moe", "ArchGates"]] == [line.split() for line in out.splitlines()[1:]]


def test_an_architecture_without_a_small_model_is_refused_with_the_option(bmoe, rows):
    code, _, err = bmoe("--archs", rows, "acme_moe")

    expected = "bmoe: arch:acme_moe: bmoe has no small model of it to test with; give one with --model FILE\n"
    assert (2, expected) == (code, err)


def test_a_row_of_a_file_is_tested_with_a_model_of_its_own(model, tmp_path):
    rows = tmp_path / "rows.toml"
    rows.write_text(ROW.format(name="qwen3moe", more='replaces = "qwen3moe"\n'))
    # relative paths mean those of the caller
    command = [
        sys.executable,
        "-m",
        "bmoe.cli",
        "gates",
        "--archs",
        "rows.toml",
        "--model",
        os.path.relpath(model, tmp_path),
    ]
    command += ["qwen3moe", "-k", "test_row_is_what or (quantisation and half)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_test_file_of_an_architecture_has_its_rows_and_its_model():
    source = gate_file([Subject("arch", "acme_moe", "bmoe", ("ArchGates",), "/r.toml", "/m.gguf")])
    names: dict[str, object] = {"__name__": "test_gates"}
    exec(source, names)
    gate = names["TestArchAcmeMoeArchGates"]

    assert ("acme_moe", ("/r.toml",), "bmoe") == (gate.arch, gate.rows, gate.plugin)
    assert Path("/m.gguf") == gate().model(None)


def test_a_model_of_another_architecture_is_refused(bmoe, model):
    code, _, err = bmoe("arch:gpt-oss", "--model", model)

    assert 2 == code
    assert f'bmoe: --model {model}: is of architecture "qwen3moe", not "gpt-oss"; give one of that\n' == err


@pytest.mark.parametrize(("names", "told"), [((), "arch:qwen3moe"), (("cache:lru",), "there is none")])
def test_a_model_goes_with_one_architecture(bmoe, model, names, told):
    code, _, err = bmoe(*names, "--model", model)

    assert 2 == code
    assert err.startswith(f"bmoe: --model {model}: goes with one architecture; name it (")
    assert told in err


def test_a_model_that_cannot_be_read_is_one_line_and_no_test_runs(bmoe, tmp_path):
    code, out, err = bmoe("arch:qwen3moe", "--model", tmp_path / "none.gguf")

    assert (1, "", 1) == (code, out, err.count("\n"))


def test_what_is_wrong_with_a_file_of_rows_is_told_in_its_own_words(bmoe, rows):
    rows.write_text("x = 1\n" + rows.read_text())
    code, _, err = bmoe("--archs", rows)

    assert 2 == code
    assert err.startswith(f"bmoe: {rows}: x = 1 is not a key of a file of rows")


def test_a_row_that_takes_a_name_of_the_tree_is_refused(bmoe, rows):
    rows.write_text(ROW.format(name="qwen3moe", more=""))
    code, _, err = bmoe("--archs", rows)

    assert 2 == code
    assert 'say replaces = "qwen3moe"' in err


def test_an_installed_plugin_that_is_none_is_refused_with_the_option(bmoe):
    code, _, err = bmoe("--plugin", "nobody")

    assert 2 == code
    assert err.startswith('bmoe: --plugin names "nobody", which is not installed; ')


def test_rows_and_an_installed_plugin_exclude_each_other(bmoe, rows):
    code, _, err = bmoe("--plugin", "nobody", "--archs", rows)

    assert 2 == code
    assert "--archs: not allowed with argument --plugin" in err
