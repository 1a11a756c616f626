"""Seeded routing traces, the same on every machine: only ``random.Random(seed).random()`` is drawn from."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from bmoe.replay import Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LAYERS, EXPERTS, USED, STEPS = 6, 32, 4, 300


def zipf(seed: int, layers: int = LAYERS, experts: int = EXPERTS, used: int = USED, steps: int = STEPS) -> Trace:
    """Each layer has favourites (Zipf, exponent 1), and now and then two of them change places."""
    rng = Random(seed)
    heights = list(accumulate(1 / rank for rank in range(1, experts + 1)))
    ranking = [_shuffled(rng, experts) for _ in range(layers)]
    trace = []
    for _ in range(steps):
        step = []
        for layer in range(layers):
            order = ranking[layer]
            if rng.random() < 0.05:
                a, b = _below(rng, experts), _below(rng, experts)
                order[a], order[b] = order[b], order[a]
            chosen: dict[int, None] = {}
            while len(chosen) < used:
                chosen[order[bisect(heights, rng.random() * heights[-1])]] = None
            step.append((layer, tuple(chosen)))
        trace.append(step)
    return trace


def scan(layers: int = LAYERS, experts: int = EXPERTS, used: int = USED, steps: int = STEPS) -> Trace:
    """Every layer goes through all of its experts in turn, again and again."""
    return [
        [(layer, tuple((t * used + slot) % experts for slot in range(used))) for layer in range(layers)]
        for t in range(steps)
    ]


def repeat(layers: int = LAYERS, used: int = USED, steps: int = STEPS) -> Trace:
    """Every step uses the same experts: the shortest token cycle there is."""
    return [[(layer, tuple(range(used))) for layer in range(layers)] for _ in range(steps)]


def locality(seed: int, layers: int = LAYERS, experts: int = EXPERTS, used: int = USED, steps: int = STEPS) -> Trace:
    """Each slot keeps its expert with a chance of 0.8; else it takes any, as after a change of topic."""
    rng = Random(seed)
    current = [_shuffled(rng, experts)[:used] for _ in range(layers)]
    trace = []
    for _ in range(steps):
        for chosen in current:
            for slot in range(used):
                if rng.random() < 0.2:
                    other = _below(rng, experts)
                    while other in chosen:
                        other = _below(rng, experts)
                    chosen[slot] = other
        trace.append([(layer, tuple(chosen)) for layer, chosen in enumerate(current)])
    return trace


GOLDEN: dict[str, Callable[[], Trace]] = {"zipf": partial(zipf, 1), "scan": scan, "locality": partial(locality, 2)}
"""The traces whose exact hits the gates record, each made when it is called."""


def probabilities(trace: Trace, seed: int = 0, experts: int = EXPERTS) -> list[NDArray[np.float32]]:
    """What a router may have given to every expert, float32 [experts] that sum to 1, for each layer of each step.

    The experts of the step have the most, in their order; half of the others' next uses can be seen coming.
    """
    import numpy as np

    rng = Random(seed)
    found = []
    for at, step in enumerate(trace):
        coming = dict(trace[min(at + 1, len(trace) - 1)])
        for layer, chosen in step:
            soon = coming.get(layer, ())
            given = [rng.random() + (expert in soon and rng.random() < 0.5) for expert in range(experts)]
            for slot, expert in enumerate(chosen):
                given[expert] = 2.0 + len(chosen) - slot
            total = sum(given)
            found.append(np.array([each / total for each in given], np.float32))
    return found


def _below(rng: Random, limit: int) -> int:
    return int(rng.random() * limit)


def _shuffled(rng: Random, count: int) -> list[int]:
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = _below(rng, last + 1)
        order[last], order[other] = order[other], order[last]
    return order
