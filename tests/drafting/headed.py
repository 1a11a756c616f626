"""Engines whose drafter guesses with the model's head, and a trunk that the head follows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bmoe.contracts import Phase
from bmoe.costs import DecodeCost
from bmoe.engine import Engine
from bmoe.layout import read_model
from bmoe.machine import read_machine
from bmoe.plan import Plan
from bmoe.planner import make_plan
from bmoe.plugins import gather_plugins
from bmoe.profile import load_profile
from bmoe.registry import load_registry
from bmoe.testing import followed
from bmoe.testing.watch import Watch

CTX, UBATCH = 96, 16
MIB = 1 << 20
RESIDENT = {"stream": {"enabled": False}}


DRAFT = {"drafter": "oracle", "max_draft": 6, "governor": "fixed", "options": {"text": []}}


def planned(path: Path, guesses: str = "head", **sections: dict) -> Plan:
    """A plan whose drafter says that it uses the head."""
    model = {"path": str(path), "ctx": CTX, "ubatch": UBATCH, "threads": 1, "kv_type": "f32", "flash_attention": False}
    table = {"model": {**model, **sections.pop("model", {})}, "draft": DRAFT, **sections}
    profile = load_profile(table)
    catalog = gather_plugins(profile, load_registry())
    oracle = replace(catalog.providers["draft"]["oracle"], guesses=guesses)
    catalog = replace(catalog, providers={**catalog.providers, "draft": {"oracle": oracle}})
    return make_plan(profile, catalog, read_model(str(path), catalog.archs), read_machine())


def budget(path: Path, share: float) -> dict:
    """A cache for this share of the trunk's experts."""
    catalog = gather_plugins(load_profile({}), load_registry())
    return {"policy": "lru", "budget_mb": share * read_model(str(path), catalog.archs).expert_bytes / MIB}


class Followed(followed.Followed):
    """A trunk with its head; ``watch`` sees what is read, and ``digest`` hashes the logits that the trunk gave."""

    def __init__(self, plan: Plan, seam: str = "auto", *, watched: bool = False) -> None:
        self.watch = Watch() if watched else None
        engine = Engine(self.watch.over(plan) if self.watch else plan, seam=seam)
        if self.watch:
            self.watch.begin(engine)
        super().__init__(engine)
        self.digest = hashlib.sha256()

    def read(self, tokens: Sequence[int], phase: Phase = "prefill") -> tuple[int, DecodeCost]:
        """Hash the last row too."""
        found = super().read(tokens, phase)
        self.digest.update(self.trunk.logits().tobytes())
        return found

    def close(self) -> None:
        """Close the engine, which closes the rest."""
        self.engine.close()
