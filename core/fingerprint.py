"""What tells one model from another, however the file is called and wherever it lies: a digest of its headers."""

from __future__ import annotations

import hashlib
import json

from bmoe.contracts import ModelFacts


def fingerprint(facts: ModelFacts) -> str:
    """SHA-256, in hexadecimal, of what the headers say: names, counts, and every tensor with type, shape and place.

    The same for a copy or a renamed file; another for another quantisation. Values of weights are not looked at.
    """
    told = (
        facts.name,
        facts.arch,
        (facts.n_layer, facts.n_expert, facts.n_used, facts.n_embd, facts.n_vocab, facts.n_ctx_train, facts.n_nextn),
        facts.chat_template,
        [shard.nbytes for shard in facts.shards],
        [
            (b.layer, b.bank, b.n_expert, b.n_used, p.tensor, p.shard, p.offset, p.stride, p.type_name)
            for b in (*facts.banks, *facts.nextn_banks)
            for p in b.projections
        ],
        [(t.name, t.shard, t.offset, t.nbytes, t.shape, t.type_name) for t in facts.dense],
    )
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
