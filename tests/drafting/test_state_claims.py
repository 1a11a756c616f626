"""What states, their snapshots and the mark take is what llama.cpp allocates, and is left free by an auto cache."""

from __future__ import annotations

import pytest

from bmoe.budget import MIB, compute_bytes
from bmoe.claims import claimed, kv_bytes
from bmoe.draftmodel import read_draft_model
from bmoe.engine import Engine
from bmoe.native import lib
from bmoe.resolve import resolve
from bmoe.synth import SHAPES
from bmoe.testing.models import TinyModels

from .states import FEW, PROMPT, SNAPSHOTS, SNAPSHOTS_AND_NONE, table


@pytest.fixture(name="models", scope="session")
def _models(tmp_path_factory):
    return TinyModels(tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("most", [0, 1, 4, 14, 15])
@pytest.mark.parametrize("arch", SNAPSHOTS_AND_NONE)
def test_the_claim_is_what_is_allocated(models, arch, most):
    """States and their snapshots as llama.cpp allocates them, and the mark; nothing of it is forgotten or doubled."""
    settings = table(models, arch, *(("self",) if most else ()))
    if most:
        settings["draft"]["max_draft"] = most
    plan = resolve(settings)
    each, drafted = plan.facts.state_bytes, plan.draft_bytes - 4 * most * plan.facts.n_vocab
    llama = lib.llama()
    with Engine(plan) as engine, engine.conversation() as conversation:
        context = conversation._context
        kept = llama.llama_n_rs_seq(context.handle)
        assert (arch in SNAPSHOTS and most > 0) == bool(kept)
        allocated = sum(context.buffers.get(kind, 0) for kind in ("RS", "state"))
        conversation.feed(PROMPT)
        marked = llama.llama_state_seq_get_size_ext(context.handle, 0, 1)
    lines = 3 if arch == "deepseek4" else 1  # of the log, each to a hundredth of a MiB
    assert abs(each * (1 + kept) - allocated) <= lines * MIB / 199
    assert drafted == each * (kept + 1 if most else 0)
    assert each <= marked <= 1.5 * each


@pytest.mark.parametrize("arch", FEW)
def test_a_budget_leaves_room_for_states(models, arch):
    """An automatic cache is smaller by what drafting takes, and the record says how much that is."""
    path = models.path(f"tiny-{arch}", "F32")
    settings = table(models, arch, "oracle", budget="auto", text=[])
    settings["draft"]["max_draft"] = 14
    plan = resolve(settings)
    facts, row = plan.facts, plan.row
    assert str(path) == facts.path
    assert claimed(plan.profile, facts, row).kv - kv_bytes(plan.profile, facts) == facts.state_bytes
    kept = 14 if arch in SNAPSHOTS else 1
    assert plan.draft_bytes == kept * facts.state_bytes + 14 * facts.n_vocab * 4
    assert plan.resolved()["draft"]["bytes"] == plan.draft_bytes


def test_a_draft_model_claims_its_states(models):
    """One of them in its context, and one for the mark: it keeps none for each token."""
    path = models.path("tiny-jamba", "F32")
    plan = resolve(table(models, "lfm2moe", "model", model=str(path)))
    facts, width = read_draft_model(str(path)), 16
    rest = facts.dense_bytes + kv_bytes(plan.profile, facts) + compute_bytes(facts, 128, width)
    own = 4 * (plan.facts.n_vocab * 4 + plan.facts.state_bytes)
    assert plan.draft_bytes == rest + own + 2 * facts.state_bytes
    assert read_draft_model(plan.facts.path).state_bytes == plan.facts.state_bytes > 0


def test_every_architecture_with_states_is_here(models):
    """A new one in the registry has to be said to keep snapshots or not."""
    found = {
        shape.arch
        for shape in SHAPES.values()
        if shape.name.startswith("tiny-") and read_draft_model(str(models.path(shape.name))).state_bytes
    }
    assert set(SNAPSHOTS_AND_NONE) == found
