"""What a cache policy would have kept: a trace fed to it as the store feeds it, with entries of equal size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, TypeAlias

from bmoe.contracts import CachePolicy, ExpertKey, RoutingEvent, expert_key
from bmoe.replay.play import Touch, play

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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


def replay(
    policy: CachePolicy, trace: Trace, capacity: int, probs: Sequence[NDArray[np.float32]] | None = None
) -> Replayed:
    """Feed ``trace`` to a fresh ``policy`` with room for ``capacity`` entries, as :func:`bmoe.replay.play.play` does.

    The same with entries of one byte each; what was given up is noted. ``probs``, for a policy that observes them, are
    what the router gave to every expert, float32 [n_expert] for each layer of each step. Raises :class:`PluginError`
    for a victim that is none.
    """
    noting = _Noting(policy)
    played = play(noting, _Equal(trace, probs), capacity)
    return Replayed(played.lookups, played.hits, tuple(noting.victims))


class _Equal:
    """A trace whose entries have one byte each, so that bytes are entries."""

    def __init__(self, trace: Trace, probs: Sequence[NDArray[np.float32]] | None) -> None:
        self._trace, self._probs = trace, probs
        self.entry_bytes = {layer: 1 for step in trace for layer, _ in step}

    def touches(self) -> Iterator[Touch]:
        shown: Iterator[NDArray[np.float32] | None] = chain(self._probs or (), repeat(None))
        for step in self._trace:
            for index, (layer, experts) in enumerate(step):
                keys = [expert_key(layer, expert) for expert in experts]
                yield Touch(keys, 1, True, index + 1 == len(step), next(shown))


class _Noting:
    """A policy that notes its victims."""

    def __init__(self, policy: CachePolicy) -> None:
        self.below_cycle = policy.below_cycle
        self.wants: frozenset[str] = getattr(policy, "wants", frozenset())
        self.observe: Callable[[RoutingEvent], None] = getattr(policy, "observe", _look_away)
        self.touch, self.admit, self.victim = policy.touch, policy.admit, policy.victim
        self._forget = policy.forget
        self.victims: list[ExpertKey] = []

    def forget(self, key: ExpertKey, /) -> None:
        self.victims.append(key)
        self._forget(key)


def _look_away(event: RoutingEvent, /) -> None:
    """What a policy that wants nothing does with a routing."""
