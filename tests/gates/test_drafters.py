"""The in-tree drafters pass their gate, and the gate catches drafters that break the contract."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp
import pytest

from bmoe.bundled import find_model
from bmoe.contracts import Proposal
from bmoe.engine import Engine
from bmoe.native.model import Context
from bmoe.resolve import resolve
from bmoe.testing import DraftGates
from bmoe.testing.archs import session_bench
from bmoe.testing.drafters import TOKENS
from bmoe.tree import Tree
from bmoe_plugins.draft.ngram import Ngram

ONCE = (0, 654, 609, 262, 653)
"""What "Once upon a time" is to the reference model."""


class TestNgram(DraftGates):
    provider = "ngram"
    options = {"min_match": 1}


class TestNgramOfSeveralMatches(DraftGates):
    provider = "ngram"
    options = {"min_match": 1, "branching": 3}


class TestOracle(DraftGates):
    provider = "oracle"

    def settings(self, bench: Any, text: Sequence[int]) -> Mapping[str, Any]:
        return {"text": list(text), "acceptance": 0.7}


class TestOracleWithSiblings(TestOracle):
    def settings(self, bench: Any, text: Sequence[int]) -> Mapping[str, Any]:
        return {"text": list(text), "acceptance": 0.5, "branching": 3}


class TestSelf(DraftGates):
    provider = "self"


class TestSelfWithOneExpert(DraftGates):
    provider = "self"
    options = {"experts": 1, "resident": False}


class TestSelfBranching(DraftGates):
    provider = "self"
    options = {"branching": 2}


class TestModel(DraftGates):
    """Drafts with a copy of the model that has fewer layers."""

    provider = "model"

    def settings(self, bench: Any, text: Sequence[int]) -> Mapping[str, Any]:
        return {"model": str(bench.models.path("tiny-qwen3moe", "F32", layers=1))}


class TestModelBranching(TestModel):
    def settings(self, bench: Any, text: Sequence[int]) -> Mapping[str, Any]:
        return {**super().settings(bench, text), "branching": 2, "depth": 3}


class TestMtp(DraftGates):
    """The head of the reference model, which was trained; in float32, so that no tree is a near tie."""

    provider = "mtp"
    prompt = ONCE

    def model(self, bench: Any) -> str:
        path = bench.folder / "bmoe-ref-f32.gguf"
        if not path.exists():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
            found = llama_cpp.llama_model_quantize(os.fsencode(find_model("bmoe-ref")), os.fsencode(path), params)
            assert found == 0
        return str(path)


class TestMtpBranching(TestMtp):
    options = {"branching": 2, "depth": 3}


# ---- the gate itself


class Ungated(TestNgram):
    __test__ = False


@pytest.fixture(name="bench")
def _bench(request, tmp_path_factory):
    return session_bench(request, tmp_path_factory)


@pytest.fixture(name="plain")
def _plain(bench):
    """What the model says after the gate's prompt."""
    gate = Ungated()
    with Engine(resolve(gate._table(bench))) as engine, engine.conversation() as conversation:
        return [token.id for token in conversation.generate(gate.prompt, TOKENS)]


def test_a_drafter_that_proposes_nothing_is_caught(bench, plain, monkeypatch):
    monkeypatch.setattr(Ngram, "draft", lambda self, context, limit, /: Proposal(()))
    with pytest.raises(AssertionError, match="the drafter is inert here"):
        Ungated().test_identity(bench, plain, "c", "half")


def test_a_drafter_that_proposes_too_much_is_caught(bench, plain, monkeypatch):
    monkeypatch.setattr(Ngram, "draft", lambda self, context, limit, /: Proposal((1,) * (limit + 1)))
    with pytest.raises(AssertionError):
        Ungated().test_proposes_what_can_be_verified(bench, plain, 0)


def test_a_drafter_that_is_asked_twice_and_answers_otherwise_is_caught(bench, plain, monkeypatch):
    answers = iter(range(500))
    monkeypatch.setattr(Ngram, "draft", lambda self, context, limit, /: Proposal((next(answers),)))
    with pytest.raises(AssertionError):
        Ungated().test_is_deterministic(bench, plain)


def test_a_loop_that_accepts_whatever_was_drafted_is_caught(bench, plain, monkeypatch):
    monkeypatch.setattr(Tree, "child", lambda self, index, token: index + 1 if index < self.drafted else None)
    with pytest.raises(AssertionError):
        Ungated().test_identity(bench, plain, "c", "half")


def test_a_rejected_token_that_stays_in_the_kv_is_caught(bench, plain, monkeypatch):
    """One cell too many is left; llama.cpp itself refuses the next token at the place of it."""
    take = Context.take
    monkeypatch.setattr(Context, "take", lambda self, path, position: take(self, path, position + (position > 15)))
    with pytest.raises(Exception, match="differ|llama_decode returned"):
        Ungated().test_what_is_rejected_leaves_no_trace(bench, plain)
