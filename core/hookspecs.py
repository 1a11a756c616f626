"""The hooks of bmoe: signatures and the two markers, no logic.

A plugin is a module (or object) with some of these functions, marked with ``bmoe.hookimpl``. Every hook collects: it
returns rows or Providers, so that names can be listed and duplicates refused. All of them are called while a profile is
opened, none afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from bmoe.contracts import (
        ArchRow,
        CachePolicy,
        DensePlacement,
        Drafter,
        Fetcher,
        Importance,
        Prefetcher,
        Provider,
        RoutingPolicy,
        Sink,
    )
    from bmoe.plan import Plan

PROJECT = "bmoe"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def bmoe_archs() -> Sequence[ArchRow]:
    """Return architecture rows; a row that takes the name of another must say ``replaces``."""


@hookspec
def bmoe_caches() -> Sequence[Provider[CachePolicy]]:
    """Return cache policies; the profile chooses one with ``cache.policy``."""


@hookspec
def bmoe_fetchers() -> Sequence[Provider[Fetcher]]:
    """Return fetchers; the profile chooses one with ``fetch.plugin``."""


@hookspec
def bmoe_prefetchers() -> Sequence[Provider[Prefetcher]]:
    """Return prefetchers; the profile chooses none or one with ``prefetch.policy``."""


@hookspec
def bmoe_dense() -> Sequence[Provider[DensePlacement]]:
    """Return dense placements; the profile chooses one with ``dense.placement``."""


@hookspec
def bmoe_routing() -> Sequence[Provider[RoutingPolicy]]:
    """Return routing policies; the profile stacks any number in its order, with ``[[routing]]``."""


@hookspec
def bmoe_importance() -> Sequence[Provider[Importance]]:
    """Return importance scorers, which routing policies name in their options."""


@hookspec
def bmoe_drafters() -> Sequence[Provider[Drafter]]:
    """Return drafters; the profile chooses none or one with ``draft.drafter``."""


@hookspec
def bmoe_sinks() -> Sequence[Provider[Sink]]:
    """Return sinks; the profile lists any number with ``[[sink]]``."""


@hookspec
def bmoe_check_plan(plan: Plan) -> Iterable[str]:
    """Return the reasons why this plan cannot run, one line each naming the TOML path and the remedy."""
