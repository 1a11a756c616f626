"""Routing policies that leave nonsense, and settings that cannot be: one line each, and nothing is lost."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bmoe.choices import Choice
from bmoe.contracts import Options, Provider, Routing
from bmoe.engine import Engine, open_engine
from bmoe.errors import ModelError, PluginError, ProfileError
from bmoe.plan import Plan
from bmoe.resolve import resolve
from bmoe.testing.models import TinyModels


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


def table(path: Path, *knobs: Any) -> dict[str, Any]:
    model = {"path": str(path), "threads": 1, "ctx": 64, "ubatch": 16}
    return {"model": model, "cache": {"policy": "lru", "budget_mb": 1}, "routing": list(knobs)}


def with_policy(plan: Plan, policy: Any) -> Plan:
    provider = Provider("broken", lambda options, facts: policy, Options, lossy=True)
    return replace(plan, routing=(Choice("routing", "broken", provider, Options(), "routing.0.plugin"),))


class Broken:
    """Leaves what cannot be computed."""

    phases = frozenset({"decode"})
    wants: frozenset[str] = frozenset()

    def __init__(self, what: str) -> None:
        self.what = what

    def apply(self, routing: Routing, /) -> None:
        if self.what == "nothing":
            routing.dead[:] = True
        elif self.what == "outside":
            routing.ids[0, -1] = routing.n_expert
        elif self.what == "twice":
            routing.ids[0, -1] = routing.ids[0, 0]
        elif self.what == "shape":
            routing.ids = routing.ids[:, :1]
        else:
            raise ZeroDivisionError("a mistake in the plugin")


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("nothing", "it left a token without an expert"),
        ("outside", r"it chose an expert outside 0\.\.7"),
        ("twice", "it chose an expert twice for one token"),
        ("shape", "it changed the shape of a routing"),
    ],
)
@pytest.mark.parametrize("seam", ["c", "python"])
def test_a_policy_that_leaves_nonsense_fails_the_decode_and_nothing_else(models, what, told, seam):
    policy = Broken(what)
    plan = with_policy(resolve(table(models.path("tiny-qwen3moe"))), policy)
    with Engine(plan, seam=seam) as engine, engine.conversation() as conversation:
        conversation.feed([3, 4])
        with pytest.raises(PluginError, match=f"the routing policy Broken, layer 0: {told}"):
            conversation.feed([5], "decode")
        assert [3, 4] == conversation.tokens
        policy.phases = frozenset()
        conversation.feed([5], "decode")
        assert np.isfinite(conversation.logits()).all()


@pytest.mark.parametrize("seam", ["c", "python"])
def test_probabilities_that_are_no_numbers_are_named(models, tmp_path, seam):
    path = tmp_path / "nan.gguf"
    shutil.copy(models.path("tiny-qwen3moe"), path)
    reader = gguf.GGUFReader(str(path), "r+")
    gate = next(t for t in reader.tensors if t.name == "blk.2.ffn_gate_inp.weight")
    gate.data[:] = math.nan
    reader.data.flush()
    knob = {"plugin": "drop-cold", "options": {"share": 0.5}}
    told = r"layer 2: what the router gives .* not a number above 0; the model file"
    with (
        open_engine(table(path, knob), seam=seam) as engine,
        engine.conversation() as conversation,
        pytest.raises(ModelError, match=told),
    ):
        conversation.feed([5], "decode")


@pytest.mark.parametrize(
    ("knob", "told"),
    [
        ({"plugin": "top-k", "options": {"k": 3}}, "routing.0.options.k = 3 is above the 2 experts that a token uses"),
        ({"plugin": "top-k", "options": {"k": 0}}, "routing.0.options.k = 0"),
        ({"plugin": "substitute", "options": {"weight": 1.5}}, "routing.0.options.weight = 1.5"),
        ({"plugin": "substitute", "options": {"weight": math.nan}}, "routing.0.options.weight = nan"),
        ({"plugin": "substitute", "options": {"keep": 9}}, "routing.0.options.keep = 9 is above the 2 experts"),
        ({"plugin": "drop-cold", "options": {"share": -1}}, "routing.0.options.share = -1"),
        ({"plugin": "moe-spec", "options": {"experts": 9}}, "routing.0.options.experts = 9 is above the 8 experts"),
        (
            {"plugin": "substitute", "options": {"ranks": 8}},
            'ranks is of variant = "max-rank", and this is "prior"; leave it out',
        ),
        ({"plugin": "topk"}, 'routing.0.plugin = "topk" is not a routing policy; did you mean "top-k"?'),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(models, knob, told):
    """Found while planning, so that a check of the profile says it too."""
    with pytest.raises(ProfileError) as caught:
        resolve(table(models.path("tiny-qwen3moe"), knob))

    (line,) = str(caught.value).splitlines()
    assert told in line


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"loss": {"budget": 0}}, "loss.budget = 0"),
        ({"loss": {"budget": 1.5}}, "loss.budget = 1.5"),
        ({"loss": {"budget": 0.1}, "routing": []}, "loss.budget: there is no routing policy that could spend it"),
        ({"stream": {"enabled": False}}, 'routing.0.plugin = "top-k" needs a streamed model'),
    ],
)
def test_a_budget_or_a_policy_out_of_place_is_one_line(models, sections, told):
    knob = {"plugin": "top-k", "options": {"k": 1}}
    with pytest.raises(ProfileError) as caught:
        resolve({**table(models.path("tiny-qwen3moe"), knob), **sections})

    (line,) = str(caught.value).splitlines()
    assert told in line


def test_a_model_with_two_banks_per_layer_is_refused(models):
    knob = {"plugin": "top-k", "options": {"k": 1}}
    with pytest.raises(ModelError, match="the graph has no node where its experts are weighed; leave"):
        open_engine(table(models.path("tiny-grovemoe"), knob)).close()
