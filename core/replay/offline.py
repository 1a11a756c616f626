"""What a cache policy would have kept: a trace fed to it as the store feeds it, with entries of equal size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bmoe.contracts import CachePolicy, ExpertKey, expert_key
from bmoe.errors import PluginError

Step: TypeAlias = Sequence[tuple[int, Sequence[int]]]
"""One token (or ubatch): per layer, in the order of the graph, the distinct experts in router order."""
Trace: TypeAlias = Sequence[Step]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Counts of one replay; ``victims`` in the order of their eviction."""

    lookups: int
    hits: int
    victims: tuple[ExpertKey, ...]

    @property
    def evictions(self) -> int:
        """Entries given up."""
        return len(self.victims)

    @property
    def hit_rate(self) -> float | None:
        """Hits over lookups; None for an empty trace."""
        return self.hits / self.lookups if self.lookups else None


def batches(trace: Trace) -> Iterator[tuple[ExpertKey, ...]]:
    """The keys of each touch of a trace."""
    for step in trace:
        for layer, experts in step:
            yield tuple(expert_key(layer, expert) for expert in experts)


def entries(trace: Trace) -> int:
    """Distinct entries of a trace."""
    return len({key for keys in batches(trace) for key in keys})


def cycle(trace: Trace) -> int:
    """Entries that one step touches, at most."""
    return max((sum(len(experts) for _, experts in step) for step in trace), default=0)


def replay(policy: CachePolicy, trace: Trace, capacity: int) -> Replayed:
    """Feed ``trace`` to a fresh ``policy`` with room for ``capacity`` entries.

    Per layer: touch, then for each miss evict until it fits and admit it; the layer's own entries are pinned, and are
    admitted beyond the capacity if nothing else is left. Each step ends within the capacity. Hits are counted here, by
    what is resident, and a victim is checked. Raises :class:`PluginError` for a victim that is none.
    """
    return _Replay(policy, capacity).run(trace)


class _Replay:
    def __init__(self, policy: CachePolicy, capacity: int) -> None:
        self._policy, self._capacity = policy, capacity
        self._resident: set[ExpertKey] = set()
        self._victims: list[ExpertKey] = []

    def run(self, trace: Trace) -> Replayed:
        lookups = hits = 0
        for step in trace:
            for layer, experts in step:
                keys = [expert_key(layer, expert) for expert in experts]
                lookups += len(keys)
                hits += self._layer(keys)
            self._shrink(self._capacity, frozenset())
        return Replayed(lookups, hits, tuple(self._victims))

    def _layer(self, keys: Sequence[ExpertKey]) -> int:
        resident, pinned = self._resident, frozenset(keys)
        missing = [key for key in keys if key not in resident]
        self._policy.touch(keys)
        for key in missing:
            self._shrink(self._capacity - 1, pinned)
            resident.add(key)
            self._policy.admit(key, False)
        return len(keys) - len(missing)

    def _shrink(self, limit: int, pinned: frozenset[ExpertKey]) -> None:
        resident = self._resident
        while len(resident) > max(limit, 0):
            victim = self._policy.victim(pinned)
            if victim is None:
                if resident <= pinned:
                    return
                raise PluginError(f"victim() is None although {len(resident - pinned)} entries are not pinned")
            if victim not in resident:
                raise PluginError(f"victim() names {victim:#x}, which is not resident")
            if victim in pinned:
                raise PluginError(f"victim() names {victim:#x}, which is pinned")
            resident.remove(victim)
            self._victims.append(victim)
            self._policy.forget(victim)
