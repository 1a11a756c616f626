"""What decodes cost: seconds, look-ups and bytes, as differences of what the stream counts."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bmoe.stream import Stream


@dataclass(slots=True)
class DecodeCost:
    """What decodes cost, as sums: seconds, look-ups and bytes. Streaming figures are None without streaming.

    ``read_bytes`` were read because they were needed, ``ahead_bytes`` because a prefetcher suggested them, of which
    ``wasted_bytes`` were given up unused and ``used_ahead_bytes`` used; in ``off`` decodes there were no guesses, since
    they did not pay. Of routing policies: slots that they ``dropped`` or ``substituted``, and the router mass ``lost``
    over so many ``routings`` of tokens; ``demanded`` entries were the model's own choice, known of verify batches and
    of what policies act on. ``worst_loss`` is the greatest of a token, not a sum.
    """

    decodes: int = 0
    decode_s: float = 0.0
    cpu_s: float = 0.0
    read_wait_s: float | None = None
    manage_s: float | None = None
    lookups: int | None = None
    hits: int | None = None
    read_bytes: int | None = None
    evictions: int | None = None
    rereads: int | None = None
    ahead_bytes: int | None = None
    wasted_bytes: int | None = None
    used_ahead_bytes: int | None = None
    off: int | None = None
    demanded: int | None = None
    dropped: int | None = None
    substituted: int | None = None
    routings: int | None = None
    lost: float | None = None
    worst_loss: float | None = None
    tokens: int = 0

    def add(self, other: DecodeCost) -> None:
        """Add another decode's cost; what either has measured is kept."""
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            both = max if name == "worst_loss" else operator.add
            setattr(self, name, theirs if mine is None else mine if theirs is None else both(mine, theirs))

    def nothing(self) -> DecodeCost:
        """The cost of no decode at all, where the same is measured as here."""
        known: dict[str, Any] = {name: 0 for name in self.__dataclass_fields__ if getattr(self, name) is not None}
        return DecodeCost(**known)

    @property
    def all_bytes(self) -> int:
        """Bytes that were read, for whatever reason."""
        return (self.read_bytes or 0) + (self.ahead_bytes or 0)

    @property
    def lost_mass(self) -> float | None:
        """The share of the router's mass that was lost, 0 to 1: the mean over tokens and their routings."""
        return self.lost / self.routings if self.routings and self.lost is not None else None


def snapshot(stream: Stream | None) -> tuple[Any, ...] | None:
    """What a stream has counted since open, in the order of :class:`DecodeCost`; None without one."""
    if stream is None:
        return None
    c, s = stream.counters, stream.store.counters
    guessed = (0, 0, 0, 0) if stream.lane is None else stream.lane.tally()
    reads = (c.wait_s, c.manage_s, s.lookups, s.hits, c.read_bytes, s.evictions, s.rereads, *guessed, c.demanded)
    k = stream.knobs.counters if stream.knobs is not None else None
    return reads if k is None else (*reads, k.dropped, k.substituted, k.routings, k.lost)


def cost_between(
    tokens: int, took: float, cpu: float, before: tuple[Any, ...] | None, after: tuple[Any, ...] | None
) -> DecodeCost:
    """The cost of one decode of ``tokens`` that took so many seconds, between two snapshots."""
    spent = () if before is None or after is None else (b - a for a, b in zip(before, after, strict=True))
    cost = DecodeCost(1, took, cpu, *spent)
    cost.tokens = tokens
    return cost
