"""One replay of a trace under a budget in bytes: a cache policy, fed as the expert store feeds it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bmoe.contracts import BatchContext, CachePolicy, ExpertKey, Observer, RoutingEvent
from bmoe.errors import PluginError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ONE_TOKEN = BatchContext("decode", (0,))
_ACCEPTED = BatchContext("verify", (0,))


class Heard(NamedTuple):
    """What one accepted token used in one layer: distinct keys in router order, with the router's probabilities."""

    keys: list[ExpertKey]
    probs: NDArray[np.float32] | None


class DraftTouch(NamedTuple):
    """A touch of a drafter's own decode (``guessed``), or the union of a verify batch in one layer.

    ``heard`` is what the cache hears after it, token after token: of a batch all at once, after its last layer.
    """

    guessed: bool
    heard: list[Heard]


class Touch(NamedTuple):
    """One layer of one token: distinct keys in router order, bytes of each, whether hits count, and token's end.

    ``probs`` is what the router gave to every expert, float32 [n_expert], where the trace has it. ``draft`` tells of a
    touch of drafts; then the keys are in the order of their last use.
    """

    keys: list[int]
    entry_bytes: int
    counted: bool
    ends_token: bool
    probs: NDArray[np.float32] | None = None
    draft: DraftTouch | None = None


class Touched(Protocol):
    """What a replay needs of a trace, such as :class:`~bmoe.replay.lookups.Lookups`."""

    @property
    def entry_bytes(self) -> Mapping[int, int]:
        """Bytes of one expert, by layer."""

    def touches(self) -> Iterator[Touch]:
        """Every touch in order."""


@dataclass(frozen=True, slots=True)
class Played:
    """Counts of the look-ups that count, and the bytes that their misses read, and those of a drafter's own decodes."""

    lookups: int
    hits: int
    missed_bytes: int

    @property
    def hit_rate(self) -> float | None:
        """Hits over look-ups; None without any."""
        return self.hits / self.lookups if self.lookups else None


def play(policy: CachePolicy, trace: Touched, budget_bytes: int) -> Played:
    """Feed ``trace`` to a fresh ``policy`` with ``budget_bytes`` of room.

    Per touch: ``touch``, then for each miss evict until it fits, and admit it. The touch's own entries are pinned, and
    are admitted beyond the budget if nothing else is left; a token ends within it. What is not counted changes what is
    resident all the same. A policy that wants to observe is shown each routing before its ``touch``. Of a verify batch
    it hears nothing before its end, and then of the accepted tokens alone, one by one; meanwhile what is missing is
    admitted cold, as in the engine. Raises :class:`PluginError` for a victim that is none.
    """
    cache = _Cache(policy, trace.entry_bytes, budget_bytes)
    resident = cache.resident
    lookups = hits = missed_bytes = 0
    for keys, size, counted, ends_token, probs, draft in trace.touches():
        missing = [key for key in keys if key not in resident]
        verified = draft is not None and not draft.guessed
        if not verified:
            cache.use(keys, probs, _ONE_TOKEN)
        if counted:
            lookups += len(keys)
            hits += len(keys) - len(missing)
        if counted or draft is not None:
            missed_bytes += len(missing) * size
        if missing:
            cache.bring(missing, size, frozenset(keys), cold=verified)
        if ends_token:
            cache.settle(draft)
    return Played(lookups, hits, missed_bytes)


class _Cache:
    """What is resident while a policy ranks."""

    def __init__(self, policy: CachePolicy, sizes: Mapping[int, int], budget_bytes: int) -> None:
        self._touch, self._victim, self._admit, self._forget = policy.touch, policy.victim, policy.admit, policy.forget
        self._observe, self._wants = _observing(policy)
        self._sizes, self._budget = sizes, budget_bytes
        self._held = 0
        self.resident: set[ExpertKey] = set()

    def use(self, keys: list[ExpertKey], probs: NDArray[np.float32] | None, batch: BatchContext) -> None:
        """One token uses these."""
        if self._observe is not None:
            self._observe(_event(keys, probs if "probs" in self._wants else None, batch))
        self._touch(keys)

    def bring(self, missing: list[ExpertKey], size: int, pinned: frozenset[ExpertKey], *, cold: bool) -> None:
        """Make room for entries of ``size`` bytes and admit them, one after the other."""
        for key in missing:
            if self._held + size > self._budget:
                self._shrink(self._budget - size, pinned)
            self.resident.add(key)
            self._held += size
            self._admit(key, cold)

    def settle(self, draft: DraftTouch | None) -> None:
        """A decode ends within the budget; then the policy hears of what a verify batch left."""
        if self._held > self._budget:
            self._shrink(self._budget, frozenset())
        for keys, probs in draft.heard if draft is not None else ():
            here = [key for key in keys if key in self.resident]
            if self._observe is not None:
                self._observe(_event(keys, probs if "probs" in self._wants else None, _ACCEPTED))
            if here:
                self._touch(here)

    def _shrink(self, room: int, pinned: frozenset[ExpertKey]) -> None:
        while self._held > room and self.resident:
            key = self._victim(pinned)
            if key is None and self.resident <= pinned:
                return
            if key is None or key not in self.resident or key in pinned:
                raise PluginError(_no_victim(key, len(self.resident - pinned), self.resident))
            self.resident.remove(key)
            self._held -= self._sizes[key >> 24]
            self._forget(key)


def play_lru(trace: Touched, budget_bytes: int) -> Played:
    """As :func:`play` with the policy ``lru``, without the calls: what is resident is kept in the order of use.

    For traces without drafts.
    """
    order: OrderedDict[ExpertKey, None] = OrderedDict()
    to_end, oldest = order.move_to_end, order.popitem
    held = lookups = hits = missed_bytes = 0
    sizes = trace.entry_bytes
    for keys, size, counted, ends_token, *_ in trace.touches():
        missed = 0
        for key in keys:
            if key in order:
                to_end(key)
            else:
                order[key] = None
                missed += 1
        if counted:
            lookups += len(keys)
            hits += len(keys) - missed
            missed_bytes += missed * size
        held += missed * size
        if held > budget_bytes:
            # the touch's own entries are the youngest, so that the oldest is never one of them while others are left
            kept = 0 if ends_token else len(keys)
            while held > budget_bytes and len(order) > kept:
                held -= sizes[oldest(last=False)[0] >> 24]
    return Played(lookups, hits, missed_bytes)


def _observing(policy: CachePolicy) -> tuple[Callable[[RoutingEvent], None] | None, frozenset[str]]:
    """How a policy is shown routings, and what of them; None if it does not ask."""
    if isinstance(policy, Observer) and policy.wants:
        return policy.observe, policy.wants
    return None, frozenset()


def _event(keys: list[int], probs: NDArray[np.float32] | None, batch: BatchContext) -> RoutingEvent:
    import numpy as np

    ids = np.array([[key & 0xFFFF for key in keys]], np.int32)
    seen = None if probs is None else probs.reshape(1, -1)
    return RoutingEvent(keys[0] >> 24, keys[0] >> 16 & 0xFF, batch, ids, seen)


def _no_victim(key: object, free: int, resident: set[ExpertKey]) -> str:
    if key is None:
        return f"victim() is None although {free} entries are not pinned; correct the policy"
    shown = f"{key:#x}" if isinstance(key, int) else repr(key)[:40]
    what = "is pinned" if isinstance(key, int) and key in resident else "is not resident"
    return f"victim() names {shown}, which {what}; correct the policy"
