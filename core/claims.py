"""What one conversation takes beside the cache, and what a plugin is told when it is built."""

from __future__ import annotations

from bmoe.budget import CacheBudget, Claims, compute_bytes
from bmoe.choices import Choice
from bmoe.contracts import ArchRow, Facts, FetchFacts, ModelFacts
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


def drafting_bytes(profile: Profile, facts: ModelFacts, draft: Choice, model: ModelFacts | None) -> int:
    """What drafting takes beside the cache: logits of all tokens of a draft, and the draft ``model``, if any."""
    assert profile.draft is not None
    rows = profile.draft.max_draft * facts.n_vocab * 4
    held = draft.provider.holds(draft.options, facts)
    if model is None:
        return rows + held
    width = min(profile.model.ubatch, profile.model.ctx)
    compute = compute_bytes(model, profile.model.ctx, width, flash=profile.model.flash_attention is not False)
    return rows + held + model.dense_bytes + kv_bytes(profile, model) + compute


def build_facts(profile: Profile, model: ModelFacts, budget: CacheBudget, ubatch: int, paths: tuple[str, ...]) -> Facts:
    """What every ``Provider.build`` is told; ``paths`` are the files that experts are read from, one per shard."""
    tokens = min(ubatch, profile.model.ctx)
    batch = max((min(b.n_expert, tokens * b.n_used) * len(b.projections) for b in model.banks), default=0)
    fetch = FetchFacts(paths, profile.fetch.lanes, profile.fetch.direct, batch)
    return Facts(model, budget.facts(profile.sampling.seed or 0), fetch)
