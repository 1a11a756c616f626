"""What will run, resolved: which plugins with which options, every size that was "auto", and why.

Made by :mod:`bmoe.planner`; what "auto" became is in :meth:`Plan.resolved`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from bmoe.budget import (
    CacheBudget,
)
from bmoe.choices import Choice
from bmoe.claims import build_facts
from bmoe.contracts import ArchRow, BankFacts, Facts, ModelFacts
from bmoe.profile import Profile


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided: which plugins with which options, and every size that was "auto".

    ``budget`` is 0 bytes when nothing is cached (``cache`` then names a policy that is not used). ``direct`` is what
    is asked for; whether a file granted it, its fetcher knows. ``paths`` are the files that experts are read from, one
    per shard; ``fetch_why`` and ``cache_why`` say how automatic ones were chosen. ``draft_bytes`` is what drafting
    takes beside the cache.
    """

    profile: Profile
    facts: ModelFacts
    row: ArchRow
    cache: Choice
    fetch: Choice
    dense: Choice
    sinks: tuple[Choice, ...]
    routing: tuple[Choice, ...]
    importance: Choice | None
    prefetch: Choice | None
    draft: Choice | None
    budget: CacheBudget
    threads: int
    ctx: int
    ubatch: int
    lanes: int
    direct: bool
    overlap: str
    notices: tuple[str, ...]
    origins: Mapping[str, str]
    experimental: bool
    paths: tuple[str, ...]
    fetch_why: str
    cache_why: str = "as the profile says"
    draft_bytes: int = 0

    @property
    def streaming(self) -> bool:
        """Whether experts are read on demand; False = plain llama.cpp."""
        return self.profile.stream.enabled

    @property
    def max_draft(self) -> int:
        """Tokens that may be drafted for one verify decode; 0 without a drafter."""
        section = self.profile.draft
        return 0 if self.draft is None or section is None else min(section.max_draft, self.ubatch - 1)

    @property
    def trees(self) -> bool:
        """Whether drafts may be trees."""
        return self.draft is not None and self.draft.provider.trees(self.draft.options)

    @property
    def drafts_with_head(self) -> bool:
        """Whether the model's head for next-token prediction guesses for the drafter, so that it is opened too."""
        return self.draft is not None and self.draft.provider.guesses == "head"

    @property
    def banks(self) -> tuple[BankFacts, ...]:
        """The routed experts that are streamed: those of the trunk, and after them the head's if it is used."""
        return (*self.facts.banks, *self.facts.nextn_banks) if self.drafts_with_head else self.facts.banks

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All chosen plugins."""
        speculative = tuple(choice for choice in (self.prefetch, self.draft, self.importance) if choice is not None)
        return (self.cache, self.fetch, self.dense, *speculative, *self.routing, *self.sinks)

    @property
    def lossy(self) -> bool:
        """Whether a chosen plugin may change the output; a drafter cannot."""
        return any(choice.provider.lossy for choice in self.choices)

    def facts_for_build(self) -> Facts:
        """What every ``Provider.build`` is told."""
        return build_facts(self.profile, self.facts, self.budget, self.ubatch, self.paths)

    def resolved(self) -> dict[str, Any]:
        """The whole plan in plain JSON types, for the run record."""
        model, budget = self.profile.model, self.budget
        return {
            "profile": self.profile.source,
            "model": self.facts.path,
            "arch": self.row.name,
            "arch_origin": self.origins.get(f"arch:{self.row.name}"),
            "streaming": self.streaming,
            "threads": self.threads,
            "ctx": self.ctx,
            "ubatch": self.ubatch,
            "kv_type": model.kv_type,
            "flash_attention": model.flash_attention,
            "repack": model.repack,
            "overlap": self.overlap,
            "cache": {
                **self._shown(self.cache),
                "why": self.cache_why,
                "budget_requested": budget.requested,
                "budget_bytes": budget.bytes,
                "capacity": budget.capacity,
                "cycle": budget.cycle,
                "cycle_bytes": budget.cycle_bytes,
                "room_bytes": budget.room,
                "used": self.streaming and budget.bytes > 0,
            },
            "fetch": {
                **self._shown(self.fetch),
                "why": self.fetch_why,
                "lanes": self.lanes,
                "direct": self.direct,
                "paths": list(self.paths),
                "used": self.streaming,
            },
            "dense": self._shown(self.dense),
            "prefetch": self._shown(self.prefetch) if self.prefetch else None,
            "draft": self._drafting(),
            "routing": [self._shown(choice) for choice in self.routing],
            "importance": self._shown(self.importance) if self.importance else None,
            "sinks": [self._shown(choice) for choice in self.sinks],
            "sampling": self.profile.sampling.model_dump(mode="json"),
            "lossy": self.lossy,
            "experimental": self.experimental,
            "notices": list(self.notices),
        }

    def _drafting(self) -> dict[str, Any] | None:
        section = self.profile.draft
        if self.draft is None or section is None:
            return None
        most = {"max_draft": self.max_draft, "governor": section.governor, "trees": self.trees}
        return {**self._shown(self.draft), **most, "bytes": self.draft_bytes}

    def _shown(self, choice: Choice) -> dict[str, Any]:
        options = to_jsonable_python(choice.options.model_dump(), fallback=str, inf_nan_mode="null")
        origin = self.origins.get(choice.label)
        return {"name": choice.name, "origin": origin, "lossy": choice.provider.lossy, "options": options}
