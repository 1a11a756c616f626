"""How large the cache of an open engine is: asked for, shrunk under memory pressure, and what follows for prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bmoe.budget import CacheBudget, resized, size_budget, widest_ubatch
from bmoe.errors import NativeError, ProfileError
from bmoe.guesses import GuessingStore
from bmoe.log import get_logger
from bmoe.native.memory import PAGE
from bmoe.plan import Plan
from bmoe.pressure import PressureWatch
from bmoe.store import ExpertStore

if TYPE_CHECKING:
    from bmoe.stream import Stream


class CacheSize:
    """The budget of one engine's cache. All calls between decodes, under the engine's lock.

    ``changed`` is told of every budget that is new; ``watch`` is None where nobody looks for memory pressure.
    """

    def __init__(
        self,
        plan: Plan,
        stream: Stream | None,
        below_cycle: bool,
        watch: PressureWatch | None,
        changed: Callable[[CacheBudget], None],
    ) -> None:
        self.resizes = 0
        self.watch = watch
        self._plan, self._stream, self._below_cycle, self._changed = plan, stream, below_cycle, changed
        self._log = get_logger()

    @property
    def width(self) -> int:
        """Tokens of a prompt that are decoded together: the plan's ubatch, or fewer since the cache became smaller."""
        store = self._stream.store if self._stream is not None else None
        if store is None or not store.budget_bytes:
            return self._plan.ubatch
        kept = store.budget_bytes - store.room_bytes
        return min(self._plan.ubatch, widest_ubatch(kept, self._plan.facts, PAGE) or self._plan.ubatch)

    def resize(self, budget_mb: float, *, busy: bool) -> int:
        """Let cached experts take ``budget_mb`` MiB; the bytes that they hold afterwards.

        Raises ProfileError in one line if the cache is off or the policy would never hit with so little, NativeError if
        a decode is running (``busy``).
        """
        store = self._stream.store if self._stream is not None else None
        if not isinstance(store, ExpertStore):
            raise ProfileError("the cache is off and cannot be resized; open with cache.budget_mb above 0")
        if busy:
            raise NativeError("the cache cannot be resized inside a decode; do it between two tokens")
        plan, guesses = self._plan, isinstance(store, GuessingStore)
        head = plan.drafts_with_head
        self._resize(store, resized(budget_mb, plan.facts, PAGE, self._below_cycle, ahead=guesses, head=head))
        return store.held_bytes

    def relieve(self, *, busy: bool) -> None:
        """Look for memory pressure and say so, or shrink the cache, as ``cache.watch`` asks."""
        if self.watch is None or self._stream is None:
            return
        store = self._stream.store
        advice = self.watch.sample(store.budget_bytes)
        if advice is None:
            return
        if advice.budget_bytes is None or not isinstance(store, ExpertStore):
            said = "lower cache.budget_mb" if store.budget_bytes else "lower model.ctx or close other programs"
            self._log.warning("memory is short", seen=advice.reason, remedy=said)
        elif advice.budget_bytes < store.budget_bytes and not busy:
            self._log.warning("memory is short: the cache shrinks", seen=advice.reason)
            plan, ahead = self._plan, isinstance(store, GuessingStore)
            head = plan.drafts_with_head
            self._resize(store, size_budget(advice.budget_bytes, "auto", plan.facts, PAGE, ahead=ahead, head=head))

    def _resize(self, store: ExpertStore, budget: CacheBudget) -> None:
        before = store.budget_bytes
        if self._stream is not None:
            self._stream.close()  # nothing is on its way into a room that goes
        store.resize(budget.bytes, budget.room)
        self.resizes += 1
        now = budget.bytes
        self._log.info("cache resized", from_mib=before >> 20, to_mib=now >> 20, held_mib=store.held_bytes >> 20)
        self._changed(budget)
