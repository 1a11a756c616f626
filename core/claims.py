"""What one conversation takes of memory beside the cached experts, by a profile."""

from __future__ import annotations

from bmoe.budget import Claims, compute_bytes
from bmoe.contracts import ArchRow, ModelFacts
from bmoe.profile import Profile

_KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}


def kv_bytes(profile: Profile, facts: ModelFacts) -> int:
    """Bytes of one conversation's KV; 0 if the model does not say."""
    return int(facts.kv_elements * profile.model.ctx * _KV_BYTES[profile.model.kv_type])


def claimed(profile: Profile, facts: ModelFacts, row: ArchRow | None) -> Claims:
    """What one conversation takes beside the cache."""
    model = profile.model
    compute = compute_bytes(
        facts,
        model.ctx,
        min(model.ubatch, model.ctx),
        flash=model.flash_attention is not False,
        all_logits=row is not None and "denoising" in row.has,
    )
    return Claims(kv=kv_bytes(profile, facts), compute=compute)
