"""Every cache policy of the tree in a real engine, with half of the experts: logits as of the model in memory."""

from __future__ import annotations

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

import bmoe
from bmoe.native.compiled import compiled_seam_missing
from bmoe.registry import load_registry
from bmoe.testing.models import TinyModels

POLICIES = [name for name in load_registry().names("cache") if name != "none"]  # which stands for a cache that is off
SEAMS = ["python", pytest.param("c", marks=pytest.mark.skipif(bool(compiled_seam_missing()), reason="no compiler"))]
MODELS = ["tiny-qwen3moe", "tiny-glm4moe"]
PROFILE = {"model": {"threads": 1, "ctx": 128, "ubatch": 16}, "fetch": {"plugin": "pread"}}
PROMPT = [(i * 37 + 11) % 512 for i in range(20)]


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory):
    return TinyModels(tmp_path_factory.mktemp("models"))


def run(model, *overrides, seam="auto"):
    """Two turns, the second with more tokens than the first left warm."""
    with bmoe.open(PROFILE, model, overrides, seam=seam) as engine, engine.conversation() as conversation:
        hashes, lookups, hits, evictions = [], 0, 0, 0
        for prompt in (PROMPT, PROMPT[::-1]):
            list(conversation.generate(prompt, 12, hash_logits=True))
            summary = conversation.summary
            hashes.append(summary.logits_sha256)
            lookups, hits, evictions = lookups + summary.lookups, hits + summary.hits, evictions + summary.evictions
        return hashes, lookups, hits, evictions, engine.plan


@pytest.fixture(name="resident", scope="module")
def _resident(models):
    """Logits of each model in memory, and half of its experts in MiB."""
    found = {}
    for like in MODELS:
        model = str(models.path(like))
        *_, plan = run(model, "cache.budget_mb=100000")
        found[like] = model, run(model, "stream.enabled=false")[0], plan.budget.bytes / 2 / (1 << 20)
    return found


@pytest.mark.parametrize("like", MODELS)
@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_output_is_that_of_the_model_in_memory(resident, policy, seam, like):
    model, expected, half = resident[like]
    hashes, lookups, hits, evictions, plan = run(model, f"cache.policy={policy}", f"cache.budget_mb={half}", seam=seam)

    assert policy == plan.cache.name
    assert expected == hashes
    assert 0 < hits < lookups
    assert evictions > 0


def test_the_replay_of_a_recorded_run_counts_its_hits(resident, tmp_path):
    """What the replay shows a policy of probabilities is what the engine showed it: both give up the same."""
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    from bmoe.replay.contender import Contender
    from bmoe.replay.play import play
    from bmoe.replay.read_lookups import read_lookups

    model, _, half = resident["tiny-qwen3moe"]
    path = tmp_path / "a.parquet"
    table = {
        **PROFILE,
        "model": {**PROFILE["model"], "ubatch": 1},
        "cache": {"policy": "router-ema", "budget_mb": half},
    }
    with bmoe.open(table, model, [f'trace.route="{path}"']) as engine, engine.conversation() as conversation:
        list(conversation.generate(PROMPT[:1], 60))
        summary, entries = conversation.summary, engine.plan.budget.capacity
    trace = read_lookups(path)
    size = next(iter(trace.entry_bytes.values()))
    policy = Contender("router-ema", "router-ema").built(trace, entries * size)
    played = play(policy, trace, entries * size)

    assert played.lookups == summary.lookups
    assert abs(played.hits - summary.hits) <= 0.05 * summary.lookups  # pages that two entries share make room for more
