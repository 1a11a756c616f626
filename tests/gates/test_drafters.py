"""The in-tree drafters pass their gate, and the gate catches drafters that break the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bmoe.testing import DraftGates


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
