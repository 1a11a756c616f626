"""docs/how-to/add-an-architecture.md, step by step, on a model that the page's own recipe writes.

No llama.cpp can run ``acme_moe``. So what only reads headers runs as it is printed, on a file of that name; what loads
the model runs with the name of an architecture that has the same tensors, whose row the page's row then replaces.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bmoe.rows import read_rows
from bmoe.synth import recipes, write_model

from .shell import Shell

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

PAGE = (Path(__file__).parents[1] / "docs/how-to/add-an-architecture.md").read_text("utf-8")
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for kind, body in FENCES if kind == "sh" for line in body.splitlines()]
ROW, TABLE = (body for kind, body in FENCES if kind == "toml")
PLUGIN, GATE, RECIPE = (body for kind, body in FENCES if kind == "python")

MADE_UP, KNOWN = "acme_moe", "qwen3moe"
FEW = "-k 'test_row or (test_identity and half-pread-2-direct-c)'"


def known(text: str) -> str:
    """What the page says, said of an architecture that llama.cpp knows and that bmoe has a row for."""
    if "ArchRow(" in text:
        text = text.replace(f'name="{MADE_UP}"', f'name="{MADE_UP}", replaces="{MADE_UP}"')
    if "[[arch]]" in text:
        text += f'replaces = "{MADE_UP}"\n'
    return text.replace(MADE_UP, KNOWN)


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as the page's recipe has it."""
    names: dict[str, Any] = {}
    exec(known(RECIPE), names)
    (entry,) = names["ARCHITECTURES"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "ARCHITECTURES", {entry.arch: entry})
        return write_model(tmp_path_factory.mktemp("model") / "acme-tiny.gguf", entry.tiny)


def prepared(root: Path, model: bytes, row: str, plugin: str) -> Shell:
    """What a reader of the page has, its package installed."""
    (root / "work").mkdir()
    for name in ("acme.gguf", "acme-tiny.gguf"):
        (root / "work" / name).write_bytes(model)
    (root / "work/my-rows.toml").write_text(row)
    info = root / "site/bmoe_acme-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bmoe-acme\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[bmoe.plugins]\nacme = bmoe_acme\n")
    (root / "site/bmoe_acme.py").write_text(plugin)
    return Shell(root / "work", root / "site")


@pytest.fixture(scope="module", name="as_printed")
def _as_printed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    content = model.read_bytes().replace(KNOWN.encode(), MADE_UP.encode())
    return prepared(tmp_path_factory.mktemp("printed"), content, ROW, PLUGIN)


@pytest.fixture(scope="module", name="renamed")
def _renamed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return prepared(tmp_path_factory.mktemp("renamed"), model.read_bytes(), known(ROW), known(PLUGIN))


def step(beginning: str) -> str:
    """The page's one command that begins so."""
    (line,) = (line for line in LINES if line.startswith(beginning))
    return line


TOLD = {
    "bmoe inspect acme.gguf": rf"can be streamed +no: architecture '{MADE_UP}' has experts but no row is known for it",
    "gguf-dump ": r"blk\.0\.ffn_gate_exps\.weight",
    "bmoe inspect --archs ": r"can be streamed +yes\n",
    "bmoe archs --enable ": rf"\n{MADE_UP} .*from acme ",
    "bmoe inspect --enable ": r"can be streamed +yes\n",
}
"""What the commands that load no model say, each by its beginning."""
LOADING = {
    "bmoe --profile ": r"32 tokens .* ended by length",
    "bmoe gates --archs ": r"\b[4-9] passed",
    "bmoe gates --plugin ": r"\b[4-9] passed",
}


def test_every_command_of_the_page_is_followed() -> None:
    assert sorted(LINES) == sorted(step(beginning) for beginning in (*TOLD, *LOADING))


@pytest.mark.parametrize("beginning", TOLD)
def test_a_step_without_the_model_does_what_the_page_says(as_printed: Shell, beginning: str) -> None:
    assert re.search(TOLD[beginning], as_printed(step(beginning)))


@pytest.mark.parametrize("beginning", LOADING)
def test_a_step_with_the_model_does_what_the_page_says(renamed: Shell, beginning: str) -> None:
    line = known(step(beginning)) + (f" {FEW}" if " gates " in beginning else " --set model.threads=1")

    assert re.search(LOADING[beginning], renamed(line))


def test_the_suffixes_that_are_found_are_those_of_the_row(as_printed: Shell) -> None:
    found = dict.fromkeys(re.findall(r"blk\.\d+\.(\w+)\.weight", as_printed(step("gguf-dump "))))
    (row,) = read_rows(str(as_printed.folder / "my-rows.toml"))

    assert sorted(found) == sorted(suffix for bank in row.experts for suffix in bank)


def test_the_table_of_bmoe_has_the_same_row(as_printed: Shell, tmp_path: Path) -> None:
    (tmp_path / "table.toml").write_text(TABLE)
    (own,), (row,) = read_rows(str(tmp_path / "table.toml")), read_rows(str(as_printed.folder / "my-rows.toml"))

    assert (own.name, own.experts, own.gating) == (row.name, row.experts, row.gating)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["", 'rows = ("my-rows.toml",)'], ids=["plugin", "rows"])
def test_the_gate_of_the_page_tests_the_file_that_it_names(renamed: Shell, chosen: str) -> None:
    """Of the plugin as it is printed, of a file of rows as the sentence after it says."""
    source = known(GATE)
    if chosen:
        source = source.replace('plugin, arch = "acme", ', f"{chosen}\n    arch = ")
        assert chosen in source
    (renamed.folder / "test_acme.py").write_text(source)

    told = renamed(f"pytest -q -p no:cacheprovider test_acme.py {FEW}")
    assert re.search(r"\b[4-9] passed", told)
