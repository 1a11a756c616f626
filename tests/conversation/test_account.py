"""What a generation gives out: whole characters, hashes of logits, records and sums."""

from __future__ import annotations

import hashlib

import pytest

from bmoe import Token
from bmoe.native.sampler import Sampler

from .runs import LONG, OFF, PROMPT, SOME, Open, run


def test_characters_split_over_tokens_come_out_whole(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(SOME)
    text = "é€ 😀ßx"
    ids = engine.model.tokenize(text)
    assert len(ids) > len(text), "the tokens must split characters"
    script = iter(ids)
    monkeypatch.setattr(Sampler, "next", lambda sampler, context, row: next(script))

    with engine.conversation() as conversation:
        tokens: list[Token] = list(conversation.generate(PROMPT, len(ids)))

    assert text == "".join(token.text for token in tokens)
    assert "" in [token.text for token in tokens]
    assert not any("\N{REPLACEMENT CHARACTER}" in token.text for token in tokens)
    assert [token.text for token in tokens] == [token.record.text for token in tokens]


def test_the_hash_is_over_every_row_that_a_token_was_chosen_from(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256()
    real = Sampler.next

    def noted(sampler: Sampler, context: object, row: int) -> int:
        digest.update(context.logits().tobytes())  # type: ignore[attr-defined]
        return real(sampler, context)  # type: ignore[arg-type]

    monkeypatch.setattr(Sampler, "next", noted)
    with opened(SOME).conversation() as conversation:
        _, found = run(conversation, PROMPT, 5)

    assert digest.hexdigest() == found


def test_records_and_summary_add_up(opened: Open) -> None:
    with opened(OFF).conversation() as conversation:
        tokens = list(conversation.generate(LONG, 6))
        summary = conversation.summary
    records = [token.record for token in tokens]
    assert summary is not None

    assert (6, 50, 4 * 2 * 5) == (summary.tokens, summary.prompt_tokens, summary.lookups)
    assert [0, 1, 2, 3, 4, 5] == [record.index for record in records]
    assert summary.bytes_read == sum(record.demand_bytes or 0 for record in records)
    assert summary.prefill_bytes == records[0].demand_bytes
    assert summary.bytes_per_token == (summary.bytes_read - summary.prefill_bytes) / 5
    assert summary.prefill_s == records[0].decode_s
    assert summary.decode_s == pytest.approx(sum(record.decode_s or 0 for record in records[1:]))
    assert (0.0, False, "length") == (summary.hit_rate, summary.lossy, summary.stop)
    assert records[0].between_s is None
    assert all(record.between_s is not None and record.between_s >= 0 for record in records[1:])
    assert summary.logits_sha256 is None


def test_the_hits_of_a_cache_are_those_of_decode_alone(opened: Open) -> None:
    with opened("cache.budget_mb=64").conversation() as conversation:
        list(conversation.generate(LONG, 3))
        list(conversation.generate(LONG, 3))
        summary = conversation.summary
    assert summary is not None

    assert (1.0, 16, 16, 0, 0) == (
        summary.hit_rate,
        summary.lookups,
        summary.hits,
        summary.bytes_read,
        summary.evictions,
    )
