"""The KV of a conversation is counted before anything else takes the memory, and refused where there is too little."""

from dataclasses import replace

import pytest

from bmoe.claims import kv_bytes
from bmoe.contracts import BankFacts, ModelFacts, ProjectionFacts, ShardFacts
from bmoe.errors import ProfileError
from bmoe.layout import read_model
from bmoe.machine import Machine
from bmoe.planner import make_plan
from bmoe.plugins import load_all, load_plugins
from bmoe.profile import load_profile
from bmoe.registry import load_registry
from bmoe.testing.models import TinyModels

MIB = 1 << 20
MACHINE = Machine(1, 4096, 512 * MIB, "Linux", "6", "x86_64", 65530)
BANKS = (BankFacts(0, 0, 4096, 2, (ProjectionFacts("blk.0.ffn_up_exps.weight", "ffn_up_exps", 0, 0, MIB, "Q8_0"),)),)
FACTS = ModelFacts(
    "m.gguf", "m", "qwen3moe", (ShardFacts("m.gguf", MIB),), 1, 4096, 2, 8, 8, 0, 0, BANKS, (), kv_elements=1024
)


def plan(*overrides, facts=FACTS):
    profile = load_profile({"fetch": {"plugin": "pread"}, "cache": {"floor_mb": 0}}, overrides=overrides)
    return make_plan(profile, load_plugins(profile, load_registry()), facts, MACHINE)


def test_a_context_whose_kv_does_not_fit_is_refused_with_the_most_that_does():
    with pytest.raises(
        ProfileError, match=r"model\.ctx = 1000000 needs 1953 MiB .* and 512 are free; give at most 262144"
    ):
        plan("model.ctx=1000000")
    assert 262144 == plan("model.ctx=262144").ctx


@pytest.mark.parametrize(("kv_type", "size"), [("f32", 4), ("f16", 2), ("q8_0", 34 / 32)])
def test_its_type_counts(kv_type, size):
    profile = load_profile({"model": {"ctx": 4096, "kv_type": kv_type}})
    assert 4096 * 1024 * size == kv_bytes(profile, FACTS)


def test_an_automatic_budget_leaves_room_for_it():
    without = plan("model.ctx=131072", "model.ubatch=32", facts=replace(FACTS, kv_elements=0)).budget.bytes
    assert 256 * MIB == without - plan("model.ctx=131072", "model.ubatch=32").budget.bytes


def test_the_width_is_read_from_the_header(tmp_path):
    path = TinyModels(tmp_path).path("tiny-qwen3moe", "F32")
    facts = read_model(path, load_all(load_registry()).archs)
    # 4 layers, 2 heads of 32 for keys and as many for values
    assert 4 * 2 * (32 + 32) == facts.kv_elements
