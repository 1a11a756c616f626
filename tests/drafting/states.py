"""Architectures that keep states, and how a tiny model of each is run with drafts."""

from __future__ import annotations

SNAPSHOTS = ("lfm2moe", "nemotron_h_moe", "bailingmoe3", "qwen35moe", "deepseek4", "kimi-k3", "glm5-next", "qwen4exp")
"""Architectures of which llama.cpp keeps a state for each token of a decode."""
NONE = ("qwen3next", "jamba", "granitehybrid", "kimi-linear", "minimax-01")
"""Those of which it keeps one alone."""
SNAPSHOTS_AND_NONE = SNAPSHOTS + NONE
FEW = ("lfm2moe", "nemotron_h_moe", "qwen3next", "jamba")
PROMPT = [11, 48, 85, 122, 159, 196, 11, 48, 85, 122, 159, 196, 11, 48, 85]
TOKENS = 24


def table(models, arch, drafter=None, budget=0, **options):
    path = models.path(f"tiny-{arch}", "F32")
    found = {
        "model": {"path": str(path), "ctx": 128, "ubatch": 16, "threads": 1, "kv_type": "f32"},
        "cache": {"policy": "lru", "budget_mb": budget},
    }
    if drafter is not None:
        found["draft"] = {"drafter": drafter, "max_draft": 4, "governor": "fixed", "options": options}
    return found


def said(conversation, count=TOKENS, prompt=PROMPT, **how):
    return [token.id for token in conversation.generate(prompt, count, **how)]
