"""The gate of importance scorers: subclass :class:`ImportanceGates`; pytest proves that a prompt gets its scores."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bmoe.contracts import BatchContext, ExpertKey, Importance, Provider
from bmoe.engine import open_engine
from bmoe.importance import laid_out
from bmoe.testing.caches import cache_facts
from bmoe.testing.load import IN_TREE, load_provider
from bmoe.testing.models import TinyModels

WORDS = b"The| keeper| of| the| light|house| wrote| the| date|,| the| wind| and| the| sea|.|\n".split(b"|")
PROMPTS: Mapping[str, Sequence[bytes]] = {
    "one token": WORDS[:1],
    "a sentence": WORDS,
    "a long text": WORDS * 60,
    "the same again and again": WORDS[:1] * 20,
    "tokens without text": [b"", *WORDS, b"", b""],
    "no text at all": [b"", b""],
    "parts of characters": [*WORDS, b" \xe2\x82", b"\xac", "中文".encode(), b"\xff", b"\x80"],
    "other scripts": ["Мир".encode(), " 你好".encode(), " café ".encode(), b"\x00\t", "😀".encode()],
}
"""Prompts as the bytes of their tokens."""


@pytest.mark.gate
class ImportanceGates:
    """Proves that a scorer keeps its contract. A subclass sets class attributes.

    ``plugin`` is the entry point of group ``bmoe.plugins`` (``"bmoe"`` for in-tree ones) that provides ``provider``.
    A scorer whose options depend on the prompt overrides :meth:`options_for`. ``tells_apart`` is False for one that
    scores the tokens of an ordinary sentence all alike.
    """

    plugin: ClassVar[str]
    provider: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    tells_apart: ClassVar[bool] = True

    def load(self) -> Provider[Importance]:
        """The provider under test, by name."""
        return load_provider("importance", self.plugin, self.provider)

    def options_for(self, count: int, folder: Path) -> Mapping[str, Any]:
        """The options for a prompt of ``count`` tokens; files that they name may be put into ``folder``."""
        return self.options

    def score(self, pieces: Sequence[bytes], folder: Path) -> Sequence[float]:
        """What a fresh scorer says of a prompt."""
        provider = self.load()
        scorer = provider.build(provider.options(**self.options_for(len(pieces), folder)), cache_facts(64))
        return scorer.score(_ids(pieces), *laid_out(pieces))

    def test_is_lossless(self) -> None:
        """A score changes nothing; the policy that goes by it does."""
        assert not self.load().lossy

    @pytest.mark.parametrize("name", PROMPTS)
    def test_every_token_has_a_score(self, name: str, tmp_path: Path) -> None:
        """One number of at least 0, or infinity, for each token of any prompt."""
        scores = self.score(PROMPTS[name], tmp_path)

        assert len(scores) == len(PROMPTS[name])
        assert all(float(score) >= 0 for score in scores), scores  # NaN is not

    def test_is_deterministic(self, tmp_path: Path) -> None:
        """Two scorers say the same of a prompt, and one that scored another prompt before it does too."""
        provider = self.load()
        pieces = PROMPTS["a sentence"]
        options = provider.options(**self.options_for(len(pieces), tmp_path))
        one, two = provider.build(options, cache_facts(64)), provider.build(options, cache_facts(64))
        first = list(one.score(_ids(pieces), *laid_out(pieces)))
        two.score(_ids(pieces[::-1]), *laid_out(pieces[::-1]))

        assert list(two.score(_ids(pieces), *laid_out(pieces))) == first

    def test_tells_tokens_apart(self, tmp_path: Path) -> None:
        """Of an ordinary sentence some tokens matter more than others, or all alike if that is what it is for."""
        assert (len(set(self.score(PROMPTS["a sentence"], tmp_path))) > 1) == self.tells_apart

    def test_a_prompt_is_read_with_its_scores(self, tmp_path: Path) -> None:
        """In a real run each part of a prompt has its tokens' scores, the greatest finite one of the prompt being 1."""
        text, folder = "The keeper of the lighthouse wrote the date and the wind, and the sea was calm." * 2, tmp_path
        path = str(TinyModels(folder).path("tiny-qwen3moe"))
        with open_engine({}, path, ["fetch.plugin=pread", "model.threads=1"]) as plain:
            prompt = plain.model.tokenize(text)
            pieces = [plain.model.piece(token) for token in prompt]
        given = dict(self.options_for(len(prompt), folder))
        options = {"importance": self.provider, "importance_options": given}
        table = {
            "model": {"path": path, "threads": 1, "ctx": 4 * len(prompt), "ubatch": 16},
            "fetch": {"plugin": "pread"},
            "routing": [{"plugin": "edgexpert-prefill", "options": options}],
            "plugins": {"enable": [] if self.plugin == IN_TREE else [self.plugin], "allow_experimental": True},
        }
        seen = _Seen()
        with open_engine(table) as engine:
            assert engine.stream is not None
            engine.stream.watch(seen)
            with engine.conversation() as one:
                list(one.generate(prompt, 2))
                list(one.generate(prompt, 2, append=True))
            shown = engine.record.resolved["importance"]
        assert json.loads(json.dumps(shown))["name"] == self.provider
        read = [batch for batch in seen.batches if batch.phase == "prefill"]
        assert {batch.importance for batch in seen.batches if batch.phase != "prefill"} == {()}
        provider = self.load()
        scorer = provider.build(provider.options(**given), cache_facts(64))
        scores = scorer.score(prompt, *laid_out(pieces))
        top = max(score for score in scores if score < math.inf)
        parts = -(-len(prompt) // 16)
        assert [batch.ubatch for batch in read] == [*range(parts)] * 2
        for half in (read[:parts], read[parts:]):
            told = [score for batch in half for score in batch.importance]
            assert len({batch.request_id for batch in half}) == 1
            assert told == pytest.approx([score / top for score in scores])
        assert read[0].request_id != read[parts].request_id


class _Seen:
    """Notes every batch."""

    def __init__(self) -> None:
        self.batches: list[BatchContext] = []

    def begin(self, batch: BatchContext, /) -> None:
        self.batches.append(batch)

    def routing(self, bank: int, keys: Sequence[ExpertKey], /) -> None: ...

    def handled(self, bank: int, /) -> None: ...

    def end(self, complete: bool, /) -> None: ...

    def accepted(self, kept: Sequence[int], /) -> None: ...


def _ids(pieces: Sequence[bytes]) -> list[int]:
    """A token's id is the place where its bytes came first."""
    return [list(pieces).index(piece) for piece in pieces]
