"""``bmoe replay --choose``: what replays best for a model is what ``cache.policy = "auto"`` becomes for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bmoe.resolve import resolve

TRACE = Path(__file__).parents[1] / "replay" / "gptoss-excerpt.route.csv"
MIB = 1 << 20


COMMAND = "replay"


@pytest.fixture(name="recorded")
def _recorded(tmp_path, monkeypatch):
    """A model, a trace of it, and a folder for what is remembered."""
    from bmoe.layout import read_model
    from bmoe.registry import load_registry as registry
    from bmoe.replay.route_trace import DECODE, Routed, trace_of, write_trace
    from bmoe.synth import write_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = str(write_model(tmp_path / "tiny.gguf", "tiny-qwen3moe"))
    facts = read_model(model, {row.name: row for row in registry().archs})
    # the same favourites all the time: what fades forgets too much
    rng, share = np.random.default_rng(3), 1 / np.arange(1, facts.n_expert + 1)
    share /= share.sum()
    size = facts.banks[0].entry_bytes
    rows = [
        Routed(0, DECODE, step, layer, slot, expert, float("nan"), 0, size)
        for step in range(500)
        for layer in (bank.layer for bank in facts.banks)
        for slot, expert in enumerate(rng.choice(facts.n_expert, facts.n_used, replace=False, p=share).tolist())
    ]
    write_trace(tmp_path / "a.csv", trace_of(facts, rows))
    return model, tmp_path / "a.csv", tmp_path / "cache" / "bmoe" / "fetch.json", facts


def known(path):
    return next(iter(json.loads(path.read_text())["cache"].values()))


def test_the_best_policy_is_remembered_for_the_model_and_auto_becomes_it(bmoe, recorded):
    model, trace, memory, facts = recorded
    memory.parent.mkdir(parents=True)
    before = {"plugin": "uring", "why": "probed"}
    memory.write_text(json.dumps({"schema": 1, "fetch": {"drive": before}}))
    budget = facts.expert_bytes / 3 / MIB
    code, out, err = bmoe(trace, "--choose", "--model", model, "--budget-mb", f"{budget:.3f}", "--json")

    assert 0 == code
    read = {row["policy"]: row["mib_per_token"] for row in json.loads(out)}
    assert {"next-use", "decay", "lfu", "s3fifo", "edgemoe", "lru"} == set(read)  # router-ema wants more than is here
    best = min(read, key=read.get)
    assert read[best] < 0.99 * read["next-use"], "another than the default has to be chosen for this test to say much"
    share = 100 * read[best] / read["lru"]
    assert f'bmoe: cache.policy = "auto" is "{best}" for {model} from now on: replayed at ' in err
    assert f"{best} reads {share:.1f} % of the bytes of lru" in err
    assert best == known(memory)["plugin"]
    assert before == json.loads(memory.read_text())["fetch"]["drive"]

    made = resolve({"cache": {"budget_mb": budget}, "model": {"path": model}}, remember=memory)
    assert best == made.cache.name
    assert f"{best} reads {share:.1f} %" in made.resolved()["cache"]["why"]


def test_where_everything_fits_the_default_stays(bmoe, recorded):
    model, trace, memory, _ = recorded
    code, _, err = bmoe(trace, "--choose", "--model", model, "--budget-mb", "1000")

    assert 0 == code
    assert "next-use" == known(memory)["plugin"]
    assert "next-use reads" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--choose"], "--choose: needs --model MODEL, the model that was run"),
        (["--choose", "--model", "MODEL", "--policy", "lru"], "--choose: compares the policies that auto may become"),
        (["--choose", "--model", "MODEL", "--enable", "shy"], "--choose: compares the policies that auto may become"),
    ],
)
def test_what_goes_not_with_choose_is_one_line(bmoe, recorded, arguments, expected):
    model, trace, memory, _ = recorded
    code, out, err = bmoe(trace, *[model if each == "MODEL" else each for each in arguments], "--budget-mb", "1")

    assert (2, "", 1) == (code, out, err.count("\n"))
    assert err.startswith(f"bmoe: {expected}")
    assert not memory.exists()


def test_the_trace_of_another_model_chooses_nothing(bmoe, recorded):
    model, _, memory, _ = recorded
    code, out, err = bmoe(TRACE, "--choose", "--model", model, "--budget-mb", "1000")

    assert (2, "", 1) == (code, out, err.count("\n"))
    assert "give --model FILE, the model that was run" in err
    assert not memory.exists()


def test_a_choice_that_cannot_be_kept_is_said_and_fails(bmoe, recorded, monkeypatch):
    model, trace, memory, _ = recorded
    memory.parent.parent.write_text("in the way")
    code, _, err = bmoe(trace, "--choose", "--model", model, "--budget-mb", "1")
    assert (1, True) == (code, "is not remembered" in err)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    code, _, err = bmoe(trace, "--choose", "--model", model, "--budget-mb", "1")
    assert (1, True) == (code, "there is no folder for it; set XDG_CACHE_HOME" in err)
