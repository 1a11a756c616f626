"""From a Plan to the objects that run: every provider built once, and from then on only plain method calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from bmoe.choices import Choice, chosen_at, of_option
from bmoe.contracts import (
    CachePolicy,
    DensePlacement,
    Drafter,
    ExpertKey,
    Facts,
    Fetcher,
    Importance,
    Observer,
    Prefetcher,
    ReadBatch,
    RoutingPolicy,
    Sink,
    Ticket,
)
from bmoe.errors import ModelError, NativeError, PluginError
from bmoe.plan import Plan
from bmoe.problems import cause

_MEMBERS = {
    "cache": ("below_cycle", "touch", "admit", "victim", "forget"),
    "fetch": ("direct", "note", "submit", "wait", "ready", "cancel", "close"),
    "prefetch": ("wants", "observe", "suggest"),
    "dense": ("place", "close"),
    "routing": ("phases", "wants", "apply"),
    "importance": ("score",),
    "draft": ("draft", "accepted"),
    "sink": ("open", "token", "close"),
}


@dataclass(frozen=True, slots=True)
class HotPath:
    """What the engine calls while it runs.

    ``policy`` is a :class:`NoCache` when nothing is cached, ``fetcher`` a :class:`NoReads` when nothing is streamed:
    the profile's own are not built then. ``prefetcher`` is None if there is none, or no room for its guesses;
    ``importance`` if no routing policy names a scorer. ``new_drafter`` builds one for each conversation;
    ``draft_routing`` is what the model itself is run with when it guesses for one.
    """

    policy: CachePolicy
    fetcher: Fetcher
    dense: DensePlacement
    sinks: tuple[Sink, ...]
    prefetcher: Prefetcher | None = None
    routing: tuple[RoutingPolicy, ...] = ()
    importance: Importance | None = None
    new_drafter: Callable[[], Drafter] | None = None
    draft_routing: RoutingPolicy | None = None

    @property
    def observer(self) -> Observer | None:
        """The cache policy, if it wants to see routings."""
        return self.policy if isinstance(self.policy, Observer) and self.policy.wants else None

    def close(self) -> None:
        """Close what was built; call it after the model is gone. Sinks are closed with their run."""
        with ExitStack() as all_of_it:
            all_of_it.callback(self.dense.close)
            all_of_it.callback(self.fetcher.close)
            all_of_it.callback(getattr(self.prefetcher, "close", lambda: None))


class NoCache:
    """The policy of a cache that is off: it never holds an entry."""

    below_cycle = False

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        """Nothing is ranked."""

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        """Nothing is kept."""

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        """Nothing could be given up."""

    def forget(self, key: ExpertKey, /) -> None:
        """Nothing was known."""


class NoReads:
    """The fetcher of a model that is not streamed: asking it to read is a bug."""

    direct = False
    note = "nothing is streamed"

    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Ticket:
        """Raise: there is nothing to read from."""
        raise NativeError(f"a read of {len(reads)} slices was asked for, but stream.enabled is false")

    def wait(self, ticket: Ticket, upto: int, /) -> int:
        """Wait for nothing."""
        return 0

    def ready(self, ticket: Ticket, upto: int, /) -> bool:
        """Nothing is out."""
        return True

    def cancel(self, ticket: Ticket, /) -> None:
        """Nothing is out."""

    def close(self) -> None:
        """Nothing is open."""


def bind(plan: Plan) -> HotPath:
    """Build every chosen plugin.

    Raises :class:`~bmoe.errors.PluginError` naming provider and TOML path if a build fails or returns an object that
    lacks a method; what was built before is closed then. A PluginError that starts with "options.KEY" gets the place
    of that option. A ModelError or NativeError passes as it is: the file or the system failed, not the plugin.
    """
    facts = plan.facts_for_build()
    with ExitStack() as built:
        fetcher: Fetcher = NoReads()
        policy: CachePolicy = NoCache()
        prefetcher: Prefetcher | None = None
        if plan.streaming:
            fetcher = _build(plan, plan.fetch, facts)
            built.callback(_close, fetcher)
            if plan.budget.bytes > 0:
                policy = _build(plan, plan.cache, facts)
            if plan.prefetch is not None and plan.budget.room:
                prefetcher = _build(plan, plan.prefetch, facts)
                built.callback(_close, prefetcher)
        dense = _build(plan, plan.dense, facts)
        built.callback(_close, dense)
        routing = tuple(_build(plan, choice, facts) for choice in plan.routing if plan.streaming)
        scorer = None if plan.importance is None or not plan.streaming else _build(plan, plan.importance, facts)
        sinks = tuple(_build(plan, choice, facts) for choice in plan.sinks)
        new_drafter, draft_routing = _drafting(plan, facts)
        built.pop_all()
    return HotPath(policy, fetcher, dense, sinks, prefetcher, routing, scorer, new_drafter, draft_routing)


def _drafting(plan: Plan, facts: Facts) -> tuple[Callable[[], Drafter] | None, RoutingPolicy | None]:
    """What builds a drafter, tried once, and the routing policy of its own that it asks for."""
    if plan.draft is None:
        return None, None
    new_drafter = functools.partial(_build, plan, plan.draft, facts)
    policy = getattr(new_drafter(), "routing", None)
    said = chosen_at(plan.profile, plan.draft)
    if plan.draft.provider.guesses == "trunk":
        missing = [name for name in _MEMBERS["routing"] if not hasattr(policy, name)]
        if missing:
            raise PluginError(f"{said} has no routing policy to guess with, or one without {missing[0]}; correct it")
    elif policy is not None:
        raise PluginError(f'{said} has a routing policy, but its provider does not say guesses = "trunk"; correct it')
    return new_drafter, policy


def _close(item: Any) -> None:
    # The first failure is the one to report.
    with suppress(Exception):
        item.close()


def _build(plan: Plan, choice: Choice, facts: Facts) -> Any:
    said = chosen_at(plan.profile, choice)
    try:
        item = choice.provider.build(choice.options, facts)
    except (ModelError, NativeError):
        raise
    except PluginError as exc:
        raise PluginError(of_option(plan.profile, choice, exc) or _cannot(said, exc)) from exc
    except Exception as exc:
        raise PluginError(_cannot(said, exc)) from exc
    members = _MEMBERS[choice.kind]
    if choice.kind == "cache" and getattr(item, "wants", None):
        members = (*members, "observe")
    missing = [name for name in members if not hasattr(item, name)]
    if missing:
        raise PluginError(f"{said} builds {type(item).__name__}, which lacks {', '.join(missing)}; correct the plugin")
    return item


def _cannot(said: str, exc: Exception) -> str:
    return f"{said} cannot be built; correct its options or the plugin ({cause(exc)})"
