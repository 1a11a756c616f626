"""A plugin of bmoe: one architecture row and one cache policy. bmoe calls these functions while it opens a profile."""

from __future__ import annotations

from bmoe import hookimpl
from bmoe.contracts import ArchRow, CachePolicy, Facts, Provider

from .hotset import Hotset, HotsetOptions

OLMOE = ArchRow(
    name="olmoe",
    experts=(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),),
    gating="softmax",
    replaces="olmoe",
    notes="OLMoE as acme converts it",
)
"""In place of bmoe's own row of that name."""


@hookimpl
def bmoe_archs() -> list[ArchRow]:
    """Offer the row."""
    return [OLMOE]


@hookimpl
def bmoe_caches() -> list[Provider[CachePolicy]]:
    """Offer ``acme.hotset``; a name from outside starts with its plugin's name."""
    return [Provider("acme.hotset", _hotset, HotsetOptions, summary="keeps what is used most often, of late")]


def _hotset(options: HotsetOptions, facts: Facts, /) -> CachePolicy:
    return Hotset(options.window)
