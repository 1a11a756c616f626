"""On a trained model, tokens of a prompt that take fewer experts have fewer bytes read; at full counts none."""

from __future__ import annotations

import json
from pathlib import Path

import bmoe
from bmoe.bundled import find_model

WHOLE = {"major": [4, 4], "minor": [4, 4], "trivial": [4, 4]}


def read_of(options):
    """Bytes read for a prompt by the reference model, and the logits after it."""
    held_out = Path(find_model("bmoe-ref")).with_name("heldout.jsonl").read_text("utf-8").splitlines()
    table = {
        "model": {"path": "bmoe-ref", "ctx": 256, "ubatch": 16, "threads": 1},
        "fetch": {"plugin": "pread"},
        "cache": {"budget_mb": 6.4},
        "routing": [{"plugin": "edgexpert-prefill", "options": options}] if options else [],
    }
    with bmoe.open(table) as engine, engine.conversation() as one:
        prompt = engine.model.tokenize(" ".join(json.loads(line)["text"] for line in held_out[:20]))[:128]
        assert len(prompt) == 128
        return one.feed(prompt).read_bytes, one.logits().tobytes()


def test_tokens_that_matter_less_have_less_read():
    plain = read_of(None)
    alike = read_of({"importance": "position", **WHOLE})
    mixed = read_of({"importance": "position"})
    trivial = read_of({"importance": "uniform", "high": 2.0, "low": 2.0})

    assert alike == plain
    assert trivial[0] < mixed[0] < plain[0]
    assert len({plain[1], mixed[1], trivial[1]}) == 3
