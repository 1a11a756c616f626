"""The reference model and its data sets come with bmoe, are found by name, and are what the demo needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

import bmoe
from bmoe.bundled import bundled_models, bundled_sets, find_model, find_set
from bmoe.cli import main
from bmoe.header import read_header
from bmoe.layout import read_model
from bmoe.resolve import resolve
from bmoe_plugins.archs.table import bmoe_archs

ROWS = {row.name: row for row in bmoe_archs()}
LIMITS = {"bmoe-ref": 30_000_000, "bmoe-ref-q4": 18_000_000}


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_the_files_that_are_promised_are_there_and_small() -> None:
    assert LIMITS.keys() == bundled_models().keys()
    assert [] == [name for name, path in bundled_models().items() if path.stat().st_size > LIMITS[name]]
    assert {"arithmetic", "heldout"} == bundled_sets().keys()


def test_they_are_what_their_names_say() -> None:
    types = {
        name: {t.type_name for t in read_header(str(path)).tensors if "_exps" in t.name}
        for name, path in bundled_models().items()
    }
    assert {"Q8_0"} == types["bmoe-ref"]
    assert "Q4_K" in types["bmoe-ref-q4"]
    facts = read_model(bundled_models()["bmoe-ref"], ROWS)
    assert ("glm4moe", 32, 4, 1, 8) == (facts.arch, facts.n_expert, facts.n_used, facts.n_nextn, len(facts.banks))


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(bundled_models()["bmoe-ref"]) == find_model("bmoe-ref")
    assert str(bundled_sets()["heldout"]) == find_set("heldout")
    Path("bmoe-ref").write_bytes(b"mine")
    assert "bmoe-ref" == find_model("bmoe-ref")


@pytest.mark.parametrize("path", ["bmoe-ref.gguf", "./bmoe-ref", "models/bmoe-ref", "bmoe-reff", ""])
def test_a_path_that_is_missing_stays_itself(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert path == find_model(path)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_demo_runs_where_something_else_has_its_models_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bmoe-ref").write_bytes(b"mine") if kind == "file" else Path("bmoe-ref").mkdir()
    assert str(bundled_models()["bmoe-ref"]) == resolve("demo").facts.path
    Path("sub").mkdir()
    Path("sub/p.toml").write_text('[model]\npath = "bmoe-ref"\n')
    assert str(bundled_models()["bmoe-ref"]) == resolve("sub/p.toml").facts.path


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["inspect", "bmoe-reff"], "bmoe-ref"),
        (["--profile", "demo", "--model", "bmoe-ref.gguf", "-p", "x"], "bmoe-ref"),
        (["eval", "heldoutt", "--profile", "demo"], "heldout"),
    ],
)
def test_a_name_that_is_misspelt_is_answered_with_the_right_one(
    arguments: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) in (1, 2)
    err = capsys.readouterr().err
    assert f'did you mean "{name}", which comes with bmoe?' in err
    assert 1 == err.count("\n")


def test_the_demo_caches_a_third_of_the_experts() -> None:
    plan = resolve("demo")
    assert str(bundled_models()["bmoe-ref"]) == plan.facts.path
    assert 0.3 < plan.budget.bytes / plan.facts.expert_bytes < 0.36
    assert plan.budget.bytes > plan.budget.cycle_bytes


def test_the_demo_says_english_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["--profile", "demo", "-p", "Once upon a time", "-n", "64", "--set", "model.threads=1"])
    text = capsys.readouterr().out
    words = text.lower().replace(".", " ").replace(",", " ").split()
    known = set(bundled_sets()["heldout"].read_text("utf-8").lower().replace(".", " ").replace(",", " ").split())
    assert len(words) > 30
    assert len(set(words)) > 20, "it goes round in circles"
    assert sum(word in known for word in words) > 0.8 * len(words)


@pytest.mark.parametrize("name", LIMITS)
def test_it_streams_as_it_runs_in_memory(name: str) -> None:
    def logits(*overrides: str) -> str | None:
        profile = {"model": {"path": name, "threads": 1, "ctx": 128, "ubatch": 32}}
        with bmoe.open(profile, overrides=overrides) as engine, engine.conversation() as conversation:
            assert list(conversation.generate("One cold morning", 16, hash_logits=True))
            assert conversation.summary is not None
            return conversation.summary.logits_sha256

    resident = logits("stream.enabled=false")
    assert resident is not None
    assert resident == logits("cache.budget_mb=6") == logits("cache.budget_mb=0")


def test_its_data_sets_can_be_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["--profile", "demo", "--limit", "2", "--set", "model.threads=1"]
    assert 0 == main(["eval", "heldout", *common])
    assert 0 == main(["eval", "arithmetic", *common, "--overwrite", "-n", "8"])
    assert (
        "notice: every reply is empty; a model that was trained on chats wants --prompts chat"
        in capsys.readouterr().err
    )
    assert 0 == main(["eval", "arithmetic", *common, "--overwrite", "--prompts", "chat", "-n", "48"])
    assert "every reply is empty" not in capsys.readouterr().err
    replies = [json.loads(line) for path in Path().glob("*.replies.jsonl") for line in path.read_text().splitlines()]
    assert 4 == sum(reply["event"] == "item" for reply in replies)
