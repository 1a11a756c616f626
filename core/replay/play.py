"""One replay of a trace under a budget in bytes: a cache policy, fed as the expert store feeds it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from bmoe.contracts import CachePolicy, ExpertKey
from bmoe.errors import PluginError


class Touch(NamedTuple):
    """One layer of one token: distinct keys in router order, bytes of each, whether hits count, and token's end."""

    keys: list[int]
    entry_bytes: int
    counted: bool
    ends_token: bool


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
    resident all the same. Raises :class:`PluginError` for a victim that is none.
    """
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

    for keys, size, counted, ends_token in trace.touches():
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
    for keys, size, counted, ends_token in trace.touches():
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


def _no_victim(key: object, free: int, resident: set[ExpertKey]) -> str:
    if key is None:
        return f"victim() is None although {free} entries are not pinned; correct the policy"
    shown = f"{key:#x}" if isinstance(key, int) else repr(key)[:40]
    what = "is pinned" if isinstance(key, int) and key in resident else "is not resident"
    return f"victim() names {shown}, which {what}; correct the policy"
