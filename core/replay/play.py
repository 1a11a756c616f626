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


class Touch(NamedTuple):
    """One layer of one token: distinct keys in router order, bytes of each, whether hits count, and token's end.

    ``probs`` is what the router gave to every expert, float32 [n_expert], where the trace has it.
    """

    keys: list[int]
    entry_bytes: int
    counted: bool
    ends_token: bool
    probs: NDArray[np.float32] | None = None


class Touched(Protocol):
    """What a replay needs of a trace, such as :class:`~bmoe.replay.lookups.Lookups`."""

    @property
    def entry_bytes(self) -> Mapping[int, int]:
        """Bytes of one expert, by layer."""

    def touches(self) -> Iterator[Touch]:
        """Every touch in order."""


@dataclass(frozen=True, slots=True)
class Played:
    """Counts of the look-ups that count, and the bytes that their misses read."""

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
    resident all the same. A policy that wants to observe is shown each routing before its ``touch``. Raises
    :class:`PluginError` for a victim that is none.
    """
    observe, wants = _observing(policy)
    resident: set[ExpertKey] = set()
    held = lookups = hits = missed_bytes = 0
    touch, victim, admit, forget = policy.touch, policy.victim, policy.admit, policy.forget
    sizes = trace.entry_bytes

    def shrink(room: int, pinned: frozenset[ExpertKey]) -> None:
        nonlocal held
        while held > room and resident:
            key = victim(pinned)
            if key is None and resident <= pinned:
                return
            if key is None or key not in resident or key in pinned:
                raise PluginError(_no_victim(key, len(resident - pinned), resident))
            resident.remove(key)
            held -= sizes[key >> 24]
            forget(key)

    for keys, size, counted, ends_token, probs in trace.touches():
        if observe is not None:
            observe(_event(keys, probs if "probs" in wants else None))
        missing = [key for key in keys if key not in resident]
        touch(keys)
        if counted:
            lookups += len(keys)
            hits += len(keys) - len(missing)
            missed_bytes += len(missing) * size
        if missing:
            pinned = frozenset(keys)
            for key in missing:
                if held + size > budget_bytes:
                    shrink(budget_bytes - size, pinned)
                resident.add(key)
                held += size
                admit(key, False)
        if ends_token and held > budget_bytes:
            shrink(budget_bytes, frozenset())
    return Played(lookups, hits, missed_bytes)


def play_lru(trace: Touched, budget_bytes: int) -> Played:
    """As :func:`play` with the policy ``lru``, without the calls: what is resident is kept in the order of use."""
    order: OrderedDict[ExpertKey, None] = OrderedDict()
    to_end, oldest = order.move_to_end, order.popitem
    held = lookups = hits = missed_bytes = 0
    sizes = trace.entry_bytes
    for keys, size, counted, ends_token, _ in trace.touches():
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


def _event(keys: list[int], probs: NDArray[np.float32] | None) -> RoutingEvent:
    import numpy as np

    ids = np.array([[key & 0xFFFF for key in keys]], np.int32)
    seen = None if probs is None else probs.reshape(1, -1)
    return RoutingEvent(keys[0] >> 24, keys[0] >> 16 & 0xFF, _ONE_TOKEN, ids, seen)


def _no_victim(key: object, free: int, resident: set[ExpertKey]) -> str:
    if key is None:
        return f"victim() is None although {free} entries are not pinned; correct the policy"
    shown = f"{key:#x}" if isinstance(key, int) else repr(key)[:40]
    what = "is pinned" if isinstance(key, int) and key in resident else "is not resident"
    return f"victim() names {shown}, which {what}; correct the policy"
