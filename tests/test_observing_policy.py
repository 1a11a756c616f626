"""A cache policy that wants to see routings is shown every one by the engine, before its entries are ranked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

import bmoe
import bmoe.engine
from bmoe.native.compiled import compiled_seam_missing
from bmoe.testing.models import TinyModels
from bmoe_plugins.caches.lru import Lru

SEAMS = ["python", pytest.param("c", marks=pytest.mark.skipif(bool(compiled_seam_missing()), reason="no compiler"))]
PROFILE = {"model": {"threads": 1, "ctx": 128, "ubatch": 16}, "fetch": {"plugin": "pread"}}
PROMPT = [3, 41, 7, 100, 12, 9, 5, 77]


class Watching(Lru):
    """Notes what it is shown, and in which order."""

    wants = frozenset({"probs"})

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.said: list[tuple[str, int, object]] = []
        self._fails_at = fails_at

    def observe(self, event):
        if len(self.said) == self._fails_at:
            raise RuntimeError("seen enough")
        self.said.append(("seen", event.layer, (event.ids.copy(), event.probs.copy(), event.batch.phase)))
        assert event.scores is None
        assert event.activation is None

    def touch(self, keys):
        super().touch(keys)
        self.said.append(("touched", keys[0] >> 24, list(keys)))


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory):
    return str(TinyModels(tmp_path_factory.mktemp("models")).path("tiny-qwen3moe"))


@pytest.fixture(name="watched")
def _watched(monkeypatch):
    def watched(policy):
        real = bmoe.engine.bind
        monkeypatch.setattr(bmoe.engine, "bind", lambda plan: replace(real(plan), policy=policy))
        return policy

    return watched


def digest(model, *overrides, seam="auto"):
    with bmoe.open(PROFILE, model, overrides, seam=seam) as engine, engine.conversation() as conversation:
        list(conversation.generate(PROMPT, 8, hash_logits=True))
        return conversation.summary.logits_sha256, len(engine.facts.banks)


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("budget_mb", [1, 64], ids=["some", "all"])
def test_it_sees_every_routing_before_it_is_ranked(model, watched, seam, budget_mb):
    plain, layers = digest(model, "stream.enabled=false")
    policy = watched(Watching())

    assert plain == digest(model, f"cache.budget_mb={budget_mb}", seam=seam)[0]

    seen, touched = policy.said[::2], policy.said[1::2]
    assert [("seen", "touched")] * (8 * layers) == [(a, b) for (a, *_), (b, *_) in zip(seen, touched, strict=True)]
    assert [layer for _, layer, _ in seen] == [layer for _, layer, _ in touched]
    for (_, layer, (ids, probs, phase)), (_, _, keys) in zip(seen, touched, strict=True):
        assert sorted({layer << 24 | expert for expert in ids.ravel().tolist()}) == sorted(keys)
        assert len(ids) == len(probs) == (1 if phase == "decode" or layer == layers - 1 else len(PROMPT))
        np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-4)
        assert (np.argmax(probs, axis=1) == ids[:, 0]).all()


def test_what_it_raises_ends_the_decode_as_itself_and_the_next_one_runs(model, watched):
    plain, layers = digest(model, "stream.enabled=false")
    policy = watched(Watching(fails_at=6 * layers))
    with bmoe.open(PROFILE, model, ["cache.budget_mb=1"]) as engine, engine.conversation() as conversation:
        with pytest.raises(RuntimeError, match="seen enough"):
            list(conversation.generate(PROMPT, 8))
        policy._fails_at = -1
        list(conversation.generate(PROMPT, 8, hash_logits=True))
        assert plain == conversation.summary.logits_sha256


def test_a_policy_that_wants_without_observing_is_refused_at_open(model, monkeypatch):
    monkeypatch.setattr(Lru, "wants", frozenset({"probs"}), raising=False)
    with pytest.raises(bmoe.PluginError, match=r'cache\.policy = "lru" builds Lru, which lacks observe; correct'):
        bmoe.open(PROFILE, model, ["cache.budget_mb=1", "cache.policy=lru"]).close()
