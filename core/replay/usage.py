"""What a routing trace says of locality: how evenly experts are used, and how alike neighbouring tokens are routed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from bmoe.replay.route_trace import ACCEPTED, DECODE, PREFILL, RouteTrace


@dataclass(frozen=True, slots=True)
class LayerUse:
    """One layer. ``counts[e]`` are the tokens that were routed to expert e, of ``tokens``; ``n_used`` of each.

    ``overlap`` is the mean of ``|top(t) & top(t - 1)| / n_used`` over ``pairs`` of neighbouring tokens, None without
    any. ``chance`` is what experts drawn evenly would give, ``usage_chance`` what draws as uneven as ``counts`` would:
    only what lies above that is locality in time.
    """

    layer: int
    n_used: int
    tokens: int
    counts: tuple[int, ...]
    overlap: float | None
    pairs: int

    @property
    def shares(self) -> tuple[float, ...]:
        """Use of each expert over its even share: 1 is even, 0 never."""
        even = sum(self.counts) / len(self.counts)
        return tuple(count / even for count in self.counts)

    @property
    def chance(self) -> float:
        """``n_used / n_expert``."""
        return self.n_used / len(self.counts)

    @property
    def usage_chance(self) -> float:
        """The expected overlap of two tokens that have nothing to do with each other, given this use."""
        return sum((count / self.tokens) ** 2 for count in self.counts) / self.n_used


def layer_use(trace: RouteTrace, phases: Iterable[int] = (PREFILL, DECODE, ACCEPTED)) -> list[LayerUse]:
    """The use of every routed layer, in order. Neighbours are tokens at following positions of one turn."""
    wanted = frozenset(phases)
    counts: dict[int, list[int]] = defaultdict(lambda: [0] * trace.n_expert)
    tokens: dict[int, int] = defaultdict(int)
    widths: dict[int, int] = {}
    common: dict[int, int] = defaultdict(int)
    pairs: dict[int, int] = defaultdict(int)
    before: dict[int, tuple[int, int, frozenset[int]]] = {}
    for group in trace.routings():
        turn, phase, step, layer = group[0][:4]
        if phase not in wanted:
            continue
        chosen = frozenset(row.expert for row in group)
        for expert in chosen:
            counts[layer][expert] += 1
        tokens[layer] += 1
        widths[layer] = max(widths.get(layer, 0), len(chosen))
        last = before.get(layer)
        if last is not None and step > 0 and last[:2] == (turn, step - 1):
            common[layer] += len(chosen & last[2])
            pairs[layer] += 1
        before[layer] = (turn, step, chosen)
    return [
        LayerUse(
            layer,
            widths[layer],
            tokens[layer],
            tuple(counts[layer]),
            common[layer] / pairs[layer] / widths[layer] if pairs[layer] else None,
            pairs[layer],
        )
        for layer in sorted(counts)
    ]
