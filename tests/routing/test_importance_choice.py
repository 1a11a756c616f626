"""A routing policy names its scorer; what is wrong with that is said like of any other plugin, before anything runs."""

from __future__ import annotations

import json
import os

import pytest

import bmoe
from bmoe.errors import PluginError, ProfileError
from bmoe.resolve import resolve
from bmoe.testing.models import TinyModels


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory):
    return str(TinyModels(tmp_path_factory.mktemp("models")).path("tiny-qwen3moe"))


def table_of(model, *options):
    base = {"path": model, "threads": 1, "ctx": 128, "ubatch": 16}
    routing = [{"plugin": "edgexpert-prefill", "options": each} for each in options]
    return {"model": base, "fetch": {"plugin": "pread"}, "routing": routing}


def problems_of(model, *options):
    with pytest.raises(ProfileError) as caught:
        resolve(table_of(model, *options))
    return str(caught.value).splitlines()


def test_it_is_resolved_with_its_options(model, tmp_path):
    file = tmp_path / "i.json"
    file.write_text("[1, 2]")

    plan = resolve(table_of(model, {"importance": "given", "importance_options": {"file": str(file)}}))

    shown = json.loads(json.dumps(plan.resolved()))
    assert shown["importance"] == {
        "name": "given",
        "origin": "bmoe_plugins.importance.given",
        "lossy": False,
        "options": {"file": str(file)},
    }
    assert [choice.label for choice in plan.choices][-2:] == ["importance:given", "routing:edgexpert-prefill"]
    assert resolve(table_of(model)).resolved()["importance"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"importance": "posiion"}, 'routing.0.options.importance = "posiion" is not an importance scorer; did you'),
        ({"importance": "auto"}, 'routing.0.options.importance = "auto" is not possible'),
        ({"importance": "acme.x"}, 'routing.0.options.importance = "acme.x" is not an importance scorer of bmoe'),
        ({}, "routing.0.options.importance is missing"),
        ({"importance": 3}, "routing.0.options.importance = 3"),
        ({"importance": "given"}, "routing.0.options.importance_options.file is missing"),
        (
            {"importance": "uniform", "importance_options": {"fiel": "x"}},
            'routing.0.options.importance_options.fiel = "x"',
        ),
        ({"importance": "uniform", "importance_options": 3}, "routing.0.options.importance_options = 3"),
        ({"importance": "uniform", "minor": [2, 3]}, "routing.0.options.minor = [2, 3] is not possible; give [k, n]"),
        ({"importance": "uniform", "low": 0.9}, "routing.0.options.low = 0.9 "),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(model, options, said):
    (line,) = problems_of(model, options)

    assert line.startswith(f"profile: {said}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is not a file; give a JSON list"),
        (b"[1, 2", "is not JSON; give a JSON list"),
        (b"\xff\xfe", "is not JSON; give a JSON list"),
        (b"[" * 100_000, "is not JSON; give a JSON list"),
        (b"{}", "has no list of numbers; give a JSON list"),
        (b"[]", "has no list of numbers; give a JSON list"),
        (b"[1, NaN]", "has NaN at place 1; give numbers of 0 or more"),
        (b"[-1]", "has -1 at place 0; give numbers of 0 or more"),
        (b"[1, true]", "has true at place 1; give numbers of 0 or more"),
        (b'[1, "2"]', 'has "2" at place 1; give numbers of 0 or more'),
        (b"[1e999]", "has Infinity at place 0; give numbers of 0 or more"),
        (b"[1" + b"0" * 400 + b"]", "has 1000000000000000000000000000000000000000 at place 0"),
    ],
)
def test_a_file_of_scores_is_read_when_the_profile_is_checked(model, tmp_path, monkeypatch, content, said):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "i.json").write_bytes(content)

    (line,) = problems_of(model, {"importance": "given", "importance_options": {"file": "i.json"}})

    assert line.startswith(f'profile: routing.0.options.importance_options.file = "i.json" {said}')


def test_a_pipe_is_not_waited_for(model, tmp_path):
    os.mkfifo(tmp_path / "pipe")

    (line,) = problems_of(model, {"importance": "given", "importance_options": {"file": str(tmp_path / "pipe")}})

    assert "is not a file" in line


def test_a_prompt_of_another_length_is_refused_and_the_conversation_goes_on(model, tmp_path):
    file = tmp_path / "scores.json"
    file.write_text("[1, 2, 3]")
    table = table_of(model, {"importance": "given", "importance_options": {"file": str(file)}})
    with bmoe.open(table) as engine, engine.conversation() as one:
        list(one.generate([5, 6, 7], 2))
        held = list(one.tokens)
        with pytest.raises(PluginError) as caught:
            one.generate([5, 6, 7, 8], 2)
        assert one.tokens == held
        assert len(list(one.generate([7, 6, 5], 2, append=True))) == 2

    place = "profile: routing.0.options.importance_options.file"
    assert str(caught.value) == f'{place} = "{file}" has 3 numbers, and the prompt has 4 tokens; give one for each'


def test_two_policies_share_one_scorer(model):
    resolve(table_of(model, {"importance": "idf"}, {"importance": "idf", "low": 0.1}))

    (line,) = problems_of(model, {"importance": "idf"}, {"importance": "position"})

    assert line.startswith('profile: routing.1.options.importance = "position" is not the scorer of routing.0')


def test_counts_beyond_the_model_are_refused_with_their_place(model):
    """They depend on the model, so they are found once that is read."""
    with pytest.raises(ProfileError, match=r"routing\.0\.options\.minor = \[9, 8\] takes more than the 2 experts"):
        bmoe.open(table_of(model, {"importance": "uniform", "minor": [9, 8]}))
    with pytest.raises(ProfileError, match=r"routing\.0\.options\.trivial = \[99, 1\] has more than the \d+ experts"):
        bmoe.open(table_of(model, {"importance": "uniform", "trivial": [99, 1]}))
