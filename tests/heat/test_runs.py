"""Runs with a heat file: the output of runs without, within the budget, and counts that come from what was decoded."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

import bmoe
import bmoe.engine
import bmoe.heat
from bmoe.errors import ProfileError, ReadError
from bmoe.heat import read_heat
from bmoe.native.compiled import compiled_seam_missing
from bmoe.testing.models import TinyModels
from bmoe_plugins.caches.lru import Lru

SEAMS = ["python", pytest.param("c", marks=pytest.mark.skipif(bool(compiled_seam_missing()), reason="no compiler"))]
PROFILE = {"model": {"threads": 1, "ctx": 128, "ubatch": 16}, "fetch": {"plugin": "pread"}}
PROMPT = [3, 41, 7, 100, 12, 9, 5, 77]
TOKENS = 12


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory):
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(name="model", scope="module")
def _model(models):
    return str(models.path("tiny-qwen3moe"))


@pytest.fixture(name="half", scope="module")
def _half(model):
    """Half of the experts, in MiB."""
    with bmoe.open(PROFILE, model, ["cache.budget_mb=100000"]) as engine:
        return f"cache.budget_mb={engine.plan.budget.bytes / 2 / (1 << 20)}"


def run(model, *overrides, seam="auto", tokens=TOKENS, prompt=PROMPT):
    with bmoe.open(PROFILE, model, overrides, seam=seam) as engine:
        store = engine.stream.store if engine.stream else None
        if store is not None:
            assert (0, 0) == (store.counters.lookups, engine.stream.counters.read_bytes)
            assert store.held_bytes <= store.budget_bytes
        with engine.conversation() as conversation:
            list(conversation.generate(prompt, tokens, hash_logits=True))
            return conversation.summary, engine


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("policy", ["lru", "next-use", "router-ema", "sieve"])
def test_the_output_is_the_same_and_what_was_used_is_there(model, half, tmp_path, seam, policy):
    plain, _ = run(model, "stream.enabled=false")
    heat = (half, f"cache.policy={policy}", f'cache.heat="{tmp_path}/h.json"')
    first, _ = run(model, *heat, seam=seam)
    second, engine = run(model, *heat, seam=seam)

    assert plain.logits_sha256 == first.logits_sha256 == second.logits_sha256
    assert 0 == first.preloaded_bytes < second.preloaded_bytes <= engine.plan.budget.bytes
    assert second.preloaded_bytes == engine.record.resolved["cache"]["preloaded_bytes"]
    assert first.lookups == second.lookups
    assert second.bytes_read < first.bytes_read


def test_the_hottest_are_read_first_and_are_hits(model, tmp_path):
    heat = f'cache.heat="{tmp_path}/h.json"'
    run(model, "cache.budget_mb=100000", heat, prompt=PROMPT[:1])
    with bmoe.open(PROFILE, model, ["cache.budget_mb=100000", heat]) as engine:
        chances = read_heat(f"{tmp_path}/h.json", engine.facts).chances()
        seam, resident = engine.seam, {}
        for base, entry, bank in zip(seam.key_base, seam.entry_base, engine.facts.banks, strict=True):
            resident |= {base + e: bool(seam.resident[entry + e]) for e in range(bank.n_expert)}
        there = [key for key, here in resident.items() if here]
        assert 0 < len(there) < len(resident)
        assert min(chances[key] for key in there) >= max(
            (chance for key, chance in chances.items() if not resident[key]), default=0
        )
        with engine.conversation() as conversation:
            (token,) = conversation.generate(PROMPT[:1], 1)
            assert token.record.hits > 0


def test_what_is_counted_is_what_was_decoded(model, half, tmp_path, monkeypatch):
    used, decoding = Counter(), []

    class Noting(Lru):
        def touch(self, keys):
            super().touch(keys)
            if decoding:
                used.update(keys)

    real_bind, real_decode = bmoe.engine.bind, bmoe.engine.Engine.decode

    def decode(engine, context, tokens, batch, cancelled):
        decoding[:] = [True] if batch.phase == "decode" else []
        return real_decode(engine, context, tokens, batch, cancelled)

    monkeypatch.setattr(bmoe.engine, "bind", lambda plan: replace(real_bind(plan), policy=Noting()))
    monkeypatch.setattr(bmoe.engine.Engine, "decode", decode)
    summary, engine = run(model, half, f'cache.heat="{tmp_path}/h.json"')

    heat = read_heat(f"{tmp_path}/h.json", engine.facts)
    assert heat.tokens == TOKENS - 1
    assert {key: count for key, count in heat.counts.items() if count} == dict(used)
    assert sum(used.values()) == summary.lookups


def test_a_run_that_decoded_nothing_leaves_no_file_and_keeps_an_old_one(model, half, tmp_path):
    path = tmp_path / "h.json"
    run(model, half, f'cache.heat="{path}"', tokens=1)
    assert not path.exists()
    run(model, half, f'cache.heat="{path}"')
    before = path.read_bytes()
    run(model, half, f'cache.heat="{path}"', tokens=1)
    assert before == path.read_bytes()


def test_the_file_of_another_model_is_refused_before_anything_is_opened_and_stays(models, model, half, tmp_path):
    path = tmp_path / "h.json"
    run(model, half, f'cache.heat="{path}"')
    before = path.read_bytes()
    for other in (models.path("tiny-glm4moe"), models.path("tiny-qwen3moe", "Q8_0")):
        with pytest.raises(ProfileError, match=r"--set: cache\.heat = .* is of another model \(") as raised:
            bmoe.open(PROFILE, str(other), [f'cache.heat="{path}"'])
        assert 1 == len(raised.value.problems)
    assert before == path.read_bytes()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (".", "is not a file; give another"),
        ("none/h.json", "is in a folder that does not exist; make it, or give another file"),
        ("notes.txt", "is no heat file, or damaged ("),
    ],
)
def test_a_place_for_no_heat_file_is_refused_in_one_line(model, tmp_path, place, said):
    (tmp_path / "notes.txt").write_text("my notes")
    with pytest.raises(ProfileError) as raised:
        bmoe.open(PROFILE, model, [f'cache.heat="{tmp_path / place}"'])
    (line,) = raised.value.problems
    assert said in line
    assert "my notes" == (tmp_path / "notes.txt").read_text()


def test_without_a_stream_it_is_refused_and_without_a_cache_it_is_said(model, tmp_path):
    heat = f'cache.heat="{tmp_path}/h.json"'
    with pytest.raises(ProfileError, match=r"cache\.heat needs a streamed model; set stream\.enabled = true"):
        bmoe.open(PROFILE, model, [heat, "stream.enabled=false"])
    summary, engine = run(model, heat, "cache.budget_mb=0")
    assert "cache.heat is not used: there is no cache" in engine.record.notices
    assert 0 == summary.preloaded_bytes
    assert not (tmp_path / "h.json").exists()


def test_a_file_that_cannot_be_kept_costs_a_line_of_the_log(model, half, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    with capture_logs() as logs, bmoe.open(PROFILE, model, [half, f'cache.heat="{folder}/h.json"']) as engine:
        with engine.conversation() as conversation:
            list(conversation.generate(PROMPT, 4))
        folder.rmdir()
    assert ["use counts are not kept"] == [line["event"] for line in logs if line["log_level"] == "warning"]


def test_a_read_that_fails_while_it_warms_ends_the_warming_alone(model, half, tmp_path, monkeypatch):
    heat = f'cache.heat="{tmp_path}/h.json"'
    plain, _ = run(model, half, heat)
    real = bmoe.engine.bind
    left = [2]

    class Failing:
        """A fetcher whose third read fails."""

        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def submit(self, reads, /, *, ahead=False):
            left[0] -= 1
            if left[0] == -1:
                raise ReadError("m.gguf: no")
            return self._inner.submit(reads, ahead=ahead)

    def failing(plan):
        bound = real(plan)
        return replace(bound, fetcher=Failing(bound.fetcher))

    monkeypatch.setattr(bmoe.engine, "bind", failing)
    with capture_logs() as logs:
        summary, _ = run(model, half, heat)

    assert plain.logits_sha256 == summary.logits_sha256
    assert summary.preloaded_bytes > 0
    told = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert ["not everything could be read that earlier runs used"] == told


def test_with_room_for_guesses_it_stays_out_of_it(model, half, tmp_path):
    heat = f'cache.heat="{tmp_path}/h.json"'
    ahead = (half, "prefetch.policy=temporal", heat)
    plain, _ = run(model, "stream.enabled=false")
    run(model, *ahead)
    with bmoe.open(PROFILE, model, ahead) as engine:
        store = engine.stream.store
        assert 0 < store.room_bytes
        assert store.held_bytes <= store.budget_bytes - store.room_bytes
        with engine.conversation() as conversation:
            list(conversation.generate(PROMPT, TOKENS, hash_logits=True))
            assert plain.logits_sha256 == conversation.summary.logits_sha256


def test_the_record_and_its_json_have_the_bytes(model, half, tmp_path):
    heat = f'cache.heat="{tmp_path}/h.json"'
    run(model, half, heat)
    summary, engine = run(model, half, heat)
    from bmoe.telemetry import record_json

    assert summary.preloaded_bytes == json.loads(json.dumps(record_json(summary)))["preloaded_bytes"] > 0
    assert engine.warmth.preloaded_bytes == summary.preloaded_bytes
