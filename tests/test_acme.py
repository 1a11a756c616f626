"""examples/bmoe-acme: builds as a wheel, passes its own tests where it is installed, and does what its page says."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bmoe.rows import read_rows
from bmoe.synth import write_model

from .shell import Shell

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

EXAMPLE = Path(__file__).parents[1] / "examples/bmoe-acme"
OFFLINE = "--disable-pip-version-check --quiet --no-deps --no-index"
PROFILE = """\
[model]
path = "olmoe.gguf"
ctx = 256
threads = 1

[cache]
budget_mb = 0.8
"""
ROW = ("olmoe", "OLMoE as acme converts it", "olmoe")
"""Name, notes and ``replaces`` of the example's row."""


@pytest.fixture(scope="module", name="shell")
def _shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """The example, installed from its wheel where nothing else is; a folder with a copy of its other files."""
    root = tmp_path_factory.mktemp("acme")
    shutil.copytree(EXAMPLE, root / "tree", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    shell = Shell(root / "work", root / "site")
    shell.folder.mkdir()
    pip = f'"{sys.executable}" -m pip'
    shell(f"{pip} wheel {OFFLINE} --no-build-isolation --no-cache-dir --wheel-dir ../wheel ../tree")
    shell(f"{pip} install {OFFLINE} --target ../site ../wheel/*.whl")
    shutil.copytree(EXAMPLE / "tests", shell.folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(EXAMPLE / "acme-rows.toml", shell.folder)
    write_model(shell.folder / "olmoe.gguf", "tiny-olmoe", locality=0.6)
    (shell.folder / "my.toml").write_text(PROFILE)
    return shell


def generated(shell: Shell, *overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run record and the summary of a generation."""
    chosen = " ".join(f"--set '{override}'" for override in overrides)
    told = shell(f"bmoe --profile my.toml {chosen} -p 'Once upon a time' -n 24 --json --hash-logits 2>/dev/null")
    run, *_, summary = map(json.loads, told.splitlines())
    return run, summary


def test_the_wheel_has_one_package_and_needs_bmoe_alone(shell: Shell) -> None:
    (path,) = (shell.folder.parent / "wheel").glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith("/METADATA"))

    assert {"bmoe_acme", "bmoe_acme-0.1.dist-info"} == {name.split("/")[0] for name in names}
    assert ["bmoe"] == re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)


def test_a_gate_takes_three_lines() -> None:
    tree = ast.parse((EXAMPLE / "tests/test_acme.py").read_text("utf-8"))
    lengths = [n.end_lineno - n.lineno + 1 for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.end_lineno]

    assert [3, 3, 3] == lengths


def test_some_of_its_own_tests_pass_where_it_is_installed(shell: Shell) -> None:
    assert re.search(r"\b8 passed", shell("pytest -q -p no:cacheprovider tests -k 'test_row or test_golden_hits'"))


@pytest.mark.slow
def test_its_own_tests_pass_where_it_is_installed(shell: Shell) -> None:
    told = shell("pytest -q -p no:cacheprovider tests")

    assert re.search(r"\b\d\d passed", told)
    assert "failed" not in told


def test_the_listings_show_what_it_provides(shell: Shell) -> None:
    plugins = json.loads(shell("bmoe plugins --enable acme --json"))["plugins"]
    archs = json.loads(shell("bmoe archs --enable acme --json"))["archs"]

    assert [("cache", "acme.hotset", ["window"])] == [
        (p["kind"], p["name"], list(p["options"])) for p in plugins if p["origin"] == "acme"
    ]
    assert [ROW] == [(a["name"], a["notes"], a["replaces"]) for a in archs if a["origin"] == "acme"]


def test_a_generation_with_its_row_and_its_policy_is_that_of_bmoe(shell: Shell) -> None:
    _, expected = generated(shell, "stream.enabled=false")
    run, summary = generated(shell, 'plugins.enable=["acme"]', "cache.policy=acme.hotset", "cache.options.window=128")

    assert "acme.hotset" in json.dumps(run)
    assert summary["logits_sha256"] == expected["logits_sha256"] is not None
    assert 0 < summary["hit_rate"] < 1


def test_the_file_of_rows_says_the_same_without_python(shell: Shell) -> None:
    _, expected = generated(shell)
    _, summary = generated(shell, 'plugins.archs=["acme-rows.toml"]')
    (row,) = read_rows(str(EXAMPLE / "acme-rows.toml"))

    assert (row.name, row.notes, row.replaces) == ROW
    assert summary["logits_sha256"] == expected["logits_sha256"] is not None
    both = """--set 'plugins.enable=["acme"]' --set 'plugins.archs=["acme-rows.toml"]'"""
    assert 'arch "olmoe" is provided by acme' in shell.run(f"bmoe --profile my.toml {both} -p a -n 1", 2).stdout


def commands() -> list[str]:
    bodies = re.findall(r"^```sh\n(.*?)^```$", (EXAMPLE / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [line for body in bodies for line in body.splitlines() if not line.startswith(("pip ", "pytest "))]


@pytest.mark.parametrize("line", commands())
def test_a_command_of_its_page_runs(shell: Shell, line: str) -> None:
    more = {"bmoe gates": " -k test_row", "bmoe --profile": " --set model.threads=1"}

    shell(line + more.get(" ".join(line.split()[:2]), ""))


def test_the_policy_is_that_of_the_page_about_policies() -> None:
    """With the same figures in both gates, it is the same policy."""
    page = (EXAMPLE.parents[1] / "docs/how-to/write-a-cache-policy.md").read_text("utf-8")
    (golden,) = re.findall(r"golden = (\{.*\})", page)

    assert f"golden = {golden}\n" in (EXAMPLE / "tests/test_acme.py").read_text("utf-8")
