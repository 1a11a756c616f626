"""An automatic budget leaves what will be taken beside it, follows what is free, and keeps a limited run alive."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bmoe
from bmoe import BankFacts, ModelFacts, ProjectionFacts
from bmoe.budget import MIB, Claims, decide_budget, held_bytes
from bmoe.claims import claimed
from bmoe.machine import Machine
from bmoe.profile import CacheSection
from bmoe.synth import SHAPES
from bmoe.testing.limits import MemoryLimit, let_everybody_read, memory_limit
from bmoe.testing.models import TinyModels
from bmoe_plugins.archs.table import bmoe_archs

PAGE = 4096


def facts(layers: int, experts: int, used: int, stride: int) -> ModelFacts:
    banks = tuple(
        BankFacts(layer, 0, experts, used, (ProjectionFacts(f"blk.{layer}.x", "x", 0, 4103, stride, "Q4_0"),))
        for layer in range(layers)
    )
    return ModelFacts("m", "m", "qwen3moe", (), layers, experts, used, 64, 100, 4096, 0, banks, ())


models = st.builds(facts, st.integers(1, 8), st.integers(1, 64), st.integers(1, 8), st.integers(1, 4 * MIB))
mib = st.integers(0, 2000)
claims = st.builds(Claims, *[st.integers(0, 300 * MIB)] * 5)


def automatic(model, free, claims, floor, ceil):
    machine = Machine(2, PAGE, free, "Linux", "6", "x86_64", None)
    section = CacheSection(floor_mb=floor, ceil_mb=ceil, policy="lru")
    return decide_budget(section, "lru", model, machine, lambda _: False, claims)


@given(models, st.integers(0, 4000 * MIB), claims, mib, mib)
def test_it_never_exceeds_what_is_free_beside_the_claims_nor_floor_and_ceiling(model, free, claims, floor, ceil):
    outcome = automatic(model, free, claims, floor, ceil)
    budget = outcome.budget

    assert not outcome.problem
    assert budget.bytes == 0 or budget.bytes + claims.nbytes + floor * MIB <= free
    assert not ceil or budget.bytes <= ceil * MIB
    assert budget.bytes == 0 or budget.bytes >= budget.cycle_bytes
    assert budget.bytes <= sum(bank.n_expert * held_bytes(bank, PAGE) for bank in model.banks)
    assert (budget.bytes == 0) == bool(outcome.notice)


@given(models, st.integers(0, 4000 * MIB), st.integers(0, 500 * MIB), claims, mib, mib)
def test_more_free_memory_is_never_a_smaller_budget(model, free, more, claims, floor, ceil):
    small, large = (automatic(model, n, claims, floor, ceil).budget.bytes for n in (free, free + more))

    assert small <= large


@given(models, st.integers(0, 4000 * MIB), claims, st.integers(0, 100 * MIB))
def test_what_a_claim_takes_is_the_caches_no_more(model, free, claims, copied):
    more = Claims(claims.kv, claims.compute, claims.copied + copied, claims.draft, claims.arena)

    before, after = (automatic(model, free, each, 0, 0).budget.bytes for each in (claims, more))
    assert after <= before
    assert after == 0 or after >= before - copied


# ---- compute buffers

LARGER = {"grok", "minimax-m3"}  # llama.cpp leaves out flash attention there, though it may choose it


@pytest.fixture(name="tiny", scope="module")
def _tiny(tmp_path_factory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("flash", ['"auto"', "false"])
@pytest.mark.parametrize(
    "shape", ["tiny-qwen3moe", "tiny-glm4moe", "tiny-gpt-oss", "tiny-deepseek2", "tiny-minimax-01"]
)
def test_the_bound_of_the_compute_buffers_holds(tiny, shape, flash):
    check_bound(tiny, shape, flash)


@pytest.mark.slow
@pytest.mark.parametrize("flash", ['"auto"', "false"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name.startswith("tiny-")])
def test_the_bound_of_the_compute_buffers_holds_for_every_architecture(tiny, shape, flash):
    check_bound(tiny, shape, flash)


def bmoe_cannot(shape):
    """Architectures of encoders and drafters: their rows say that no model of them is run."""
    rows = {row.name: row for row in bmoe_archs()}
    return bool(rows[shape.removeprefix("tiny-")].cannot)


def check_bound(tiny, shape, flash):
    if shape.removeprefix("tiny-") in LARGER and flash == '"auto"':
        return
    overrides = [f"model.flash_attention={flash}", "model.ctx=4096", "model.ubatch=256", "cache.budget_mb=0"]
    if bmoe_cannot(shape):
        return
    with bmoe.open({"model": {"threads": 1}}, str(tiny.path(shape)), overrides) as engine:
        bound = claimed(engine.plan.profile, engine.facts, engine.plan.row).compute
        assert 0 < engine.buffers["compute"] + engine.buffers.get("output", 0) <= bound


# ---- a real limit


@pytest.fixture(name="limit")
def _limit() -> Iterator[MemoryLimit]:
    with memory_limit(420 * MIB) as limit:
        if limit is None:
            pytest.skip("nobody may limit memory here: no control group that can be made, no systemd")
        yield limit


@pytest.mark.parametrize("dropped", [False, True], ids=["as it is", "without privileges"])
def test_under_a_real_limit_the_run_lives_and_stays_below_it(limit, model, dropped, tmp_path):
    """864 MiB of experts under 420 MiB: half of a budget too much, and the kernel ends the process."""
    program = f"""
import json, os
import bmoe
overrides = ["cache.floor_mb=96", "model.threads=1", "model.ctx=256", "model.ubatch=4"]
# everything is imported before: an interpreter may lie where only its owner reads
bmoe.open({{}}, {model!r}, [*overrides, "cache.budget_mb=0"]).close()
if {dropped} and os.getuid() == 0:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
with bmoe.open({{}}, {model!r}, overrides) as engine, engine.conversation() as conversation:
    for _ in conversation.generate([5, 300, 301, 7], 150): pass
    s = conversation.summary
    print(json.dumps([engine.plan.budget.bytes, engine.plan.budget.cycle_bytes, s.cache_held_bytes, s.tokens, s.stop,
                      engine.plan.budget.requested, os.getuid()]))
"""
    let_everybody_read(Path(model))
    done = subprocess.run(
        limit.command([sys.executable, "-c", program]), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    budget, cycle, held, tokens, stop, requested, user = json.loads(done.stdout)

    assert (150, "length", "auto") == (tokens, stop, requested)
    assert cycle <= budget < 420 * MIB - 96 * MIB
    assert held >= 0.9 * budget, "the budget was not used, so that the limit was not tried"
    assert not dropped or user != 0
    assert limit.peak_bytes is None or limit.peak_bytes <= 420 * MIB
    assert not limit.read("memory.failcnt") or limit.read("memory.oom_control") is None
