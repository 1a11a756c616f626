"""What one conversation takes beside the cache, and what a plugin is told when it is built."""

from __future__ import annotations

from bmoe.budget import CacheBudget, Claims, compute_bytes
from bmoe.choices import Choice
from bmoe.contracts import ArchRow, Facts, FetchFacts, ModelFacts
from bmoe.profile import Profile
from bmoe.states import SNAPSHOTS

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
    return Claims(kv=kv_bytes(profile, facts) + facts.state_bytes, compute=compute)


def drafting_bytes(profile: Profile, facts: ModelFacts, draft: Choice, model: ModelFacts | None) -> int:
    """What drafting takes beside the cache: logits and states of all tokens of a draft, and what guesses them.

    That is the draft ``model``, if there is one; or the model's own head, which is a layer with a KV and buffers of its
    own, and takes the trunk's hidden state of every token, which a ubatch has once more as llama.cpp gives it.
    """
    assert profile.draft is not None
    ctx, width = profile.model.ctx, min(profile.model.ubatch, profile.model.ctx)
    rows = profile.draft.max_draft * facts.n_vocab * 4
    kept = snapshots(facts, profile.draft.max_draft, width)
    # where states are kept for fewer tokens, they are marked before a round
    marked = draft.provider.guesses == "trunk" or kept < profile.draft.max_draft
    own = rows + (kept + marked) * facts.state_bytes + draft.provider.holds(draft.options, facts)
    if model is None and draft.provider.guesses != "head":
        return own
    compute = compute_bytes(model or facts, ctx, width, flash=profile.model.flash_attention is not False)
    if model is not None:
        return own + model.dense_bytes + kv_bytes(profile, model) + 2 * model.state_bytes + compute
    layers = max(1, facts.n_layer - facts.n_nextn)
    return own + kv_bytes(profile, facts) // layers + 4 * facts.n_embd * (ctx + 1 + width) + compute


def snapshots(facts: ModelFacts, max_draft: int, ubatch: int) -> int:
    """For how many tokens of a verify decode llama.cpp keeps the states before them, beside those after the last."""
    # it ends the process where a ubatch has no room for one token more than those
    return max(0, min(max_draft, ubatch - 2)) if facts.arch in SNAPSHOTS else 0


def build_facts(profile: Profile, model: ModelFacts, budget: CacheBudget, ubatch: int, paths: tuple[str, ...]) -> Facts:
    """What every ``Provider.build`` is told; ``paths`` are the files that experts are read from, one per shard."""
    tokens = min(ubatch, profile.model.ctx)
    batch = max((min(b.n_expert, tokens * b.n_used) * len(b.projections) for b in model.banks), default=0)
    fetch = FetchFacts(paths, profile.fetch.lanes, profile.fetch.direct, batch)
    return Facts(model, budget.facts(profile.sampling.seed or 0), fetch)
