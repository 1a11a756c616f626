"""Which cache policy a model should have, from replays of what it was recorded to use."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from bmoe.contracts import ModelFacts
from bmoe.errors import PluginError
from bmoe.replay.contender import LRU, Contender
from bmoe.replay.lookups import Lookups
from bmoe.replay.route_trace import TraceError
from bmoe.replay.sweep import MIB, Result
from bmoe.verdicts import Verdict

CLEARLY = 0.99
"""Another policy than the default must read this share of its bytes, or less, to be chosen: the rest is noise."""


def candidates(names: Sequence[str], traces: Sequence[Lookups]) -> list[Contender]:
    """Those of ``names`` that can be replayed on every trace: some ask for what a trace may lack."""
    found = []
    for contender in (Contender(name, name) for name in names):
        with contextlib.suppress(PluginError):
            for trace in traces:
                contender.built(trace, MIB)
            found.append(contender)
    return found


def check_model(trace: Lookups, facts: ModelFacts) -> None:
    """Raise :class:`TraceError` if the trace cannot be of this model."""
    trunk = facts.n_layer - facts.n_nextn
    layers = trace.n_layer if trace.n_layer == facts.n_layer else trunk  # with the head, if it guessed
    theirs = f"{trace.arch}, {trace.n_layer} layers with {trace.n_expert} experts"
    ours = f"{facts.arch}, {layers} layers with {facts.n_expert} experts"
    if theirs != ours:
        said = f"is of a model of {theirs}, and {facts.path} is of {ours}"
        raise TraceError(f"{trace.source}: {said}; give --model FILE, the model that was run")


def choose_policy(results: Sequence[Result], default: str, facts: ModelFacts) -> Verdict:
    """The policy that reads the fewest bytes, in the geometric mean over traces and budgets, relative to LRU.

    LRU itself is only compared with: below one token's cycle it has no hit, and a budget may come to be there.
    ``default`` stays unless another reads clearly less; a budget for which LRU reads nothing says nothing.
    """
    read: dict[tuple[str, int], dict[str, int]] = {}
    for r in results:
        read.setdefault((r.trace.source, r.budget_bytes), {})[r.contender.name] = r.played.missed_bytes
    told = [cell for cell in read if read[cell][LRU]]
    budgets = ", ".join(f"{mib / MIB:g}" for mib in dict.fromkeys(r.budget_bytes for r in results))
    seen = f"replayed at {budgets} MiB"
    fewer = next((r.trace.n_used for r in results if r.trace.n_used != facts.n_used), None)
    if fewer is not None:
        seen += f", recorded with {fewer} experts per token instead of {facts.n_used}"
    if not told:
        return Verdict(default, f"{seen}: everything fits, whatever the policy")
    names = [name for name in dict.fromkeys(r.contender.name for r in results) if name != LRU]
    means = {name: _mean([max(1, read[cell][name]) / read[cell][LRU] for cell in told]) for name in names}
    best = min(names, key=lambda name: (means[name] * (CLEARLY if name == default else 1), name))
    said = f"{seen}: {best} reads {100 * means[best]:.1f} % of the bytes of lru"
    others = sorted((mean, name) for name, mean in means.items() if name != best)
    if others:
        said += f", {others[0][1]} {100 * others[0][0]:.1f} %"
    return Verdict(best, said)


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
