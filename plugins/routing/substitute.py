"""Cache-conditional routing: experts that are in memory take the place of slightly better ones that are not.

Three variants, all of which keep a token's best ``keep`` experts: ``max-rank`` fills up with resident experts among the
best ``ranks``, ``cumulative`` with those among the shortest row of best ones that has probability ``mass``, ``prior``
adds ``weight`` times the usual range of a layer's logits to those of resident experts and chooses again. What takes a
slot has its true weight. Source: Mixture of Cache-Conditional Experts, arXiv 2412.00099.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Options, Routing, RoutingPolicy
from bmoe.errors import PluginError
from bmoe_plugins.routing._place import place
from bmoe_plugins.routing._scope import Scope, phases


class SubstituteOptions(Options):
    """Which variant, and how far it goes."""

    variant: Literal["prior", "max-rank", "cumulative"] = Field(default="prior", description="which rule chooses")
    weight: float = Field(
        default=0.1, ge=0, le=1, allow_inf_nan=False, description="prior: part of the logits' range; 0 is neutral"
    )
    ranks: int = Field(default=0, ge=0, description="max-rank: best experts that may be chosen; 0 is neutral")
    mass: float = Field(
        default=0.0, ge=0, le=1, allow_inf_nan=False, description="cumulative: probability of those; 0 is neutral"
    )
    keep: int = Field(default=1, ge=1, description="best experts of a token that always stay")
    scope: Scope = Field(default="decode", description="where it acts: decode, prefill or both")

    @model_validator(mode="after")
    def _of_this_variant(self) -> SubstituteOptions:
        for name, variant in _VARIANT_OF.items():
            if name in self.model_fields_set and variant != self.variant:
                raise ValueError(f'{name} is of variant = "{variant}", and this is "{self.variant}"; leave it out')
        return self


_VARIANT_OF = {"weight": "prior", "ranks": "max-rank", "mass": "cumulative"}


class Substitute:
    """Chooses again, token by token, against one look at what is in memory."""

    wants: frozenset[str] = frozenset()

    def __init__(self, options: SubstituteOptions) -> None:
        self.phases = phases(options.scope)
        self._options = options
        self._range: dict[tuple[int, int], tuple[int, float]] = {}

    def apply(self, routing: Routing, /) -> None:
        prior = self._options.variant == "prior"
        for token, own in enumerate(routing.ids.tolist()):
            chosen = self._prior(routing, token, len(own)) if prior else self._filled(routing, token, len(own))
            if set(chosen) != set(own):
                place(routing, token, chosen)

    def _prior(self, routing: Routing, token: int, count: int) -> Sequence[int]:
        logits = _logits(routing.scores[token].tolist())
        finite = [value for value in logits if value > -math.inf]
        layer = (routing.layer, routing.bank)
        seen, mean = self._range.get(layer, (0, 0.0))
        mean += (max(finite) - min(finite) - mean) / (seen + 1)
        self._range[layer] = seen + 1, mean
        bonus, resident = self._options.weight * mean, routing.resident
        best = routing.ranking[token, : self._options.keep].tolist()
        biased = [value + bonus if resident[e] or e in best else value for e, value in enumerate(logits)]
        order: list[int] = sorted(routing.ranking[token].tolist(), key=biased.__getitem__, reverse=True)
        return order[:count]

    def _filled(self, routing: Routing, token: int, count: int) -> Sequence[int]:
        ranking: list[int] = routing.ranking[token].tolist()
        keep, reach = min(self._options.keep, count), self._options.ranks
        if self._options.variant == "cumulative":
            mass, reach = 0.0, 0
            whole = float(routing.probs[token].sum())
            while mass < self._options.mass * whole * (1 - 1e-6) and reach < len(ranking):
                mass += float(routing.probs[token, ranking[reach]])
                reach += 1
        allowed = [e for e in ranking[:reach] if routing.scores[token, e] > -math.inf]
        chosen = ranking[:keep] + [e for e in allowed[keep:] if routing.resident[e]]
        return (chosen + [e for e in ranking if e not in chosen])[:count]


def _logits(scores: list[float]) -> list[float]:
    """Logits up to a constant: scores that are a softmax are taken back, others are as the model compares them."""
    if min(scores) >= 0 and abs(sum(scores) - 1) < 1e-3:
        return [math.log(score) if score > 0 else -math.inf for score in scores]
    return scores


def _build(options: SubstituteOptions, facts: Facts, /) -> RoutingPolicy:
    used = max((bank.n_used for bank in facts.model.banks), default=options.keep)
    if options.keep > used:
        raise PluginError(f"options.keep = {options.keep} is above the {used} experts of a token; give at most {used}")
    experts = max((bank.n_expert for bank in facts.model.banks), default=options.ranks)
    if options.ranks > experts:
        raise PluginError(
            f"options.ranks = {options.ranks} is above the {experts} experts of a layer; give at most that"
        )
    return Substitute(options)


@hookimpl
def bmoe_routing() -> list[Provider[RoutingPolicy]]:
    """Return cache-conditional routing."""
    trials = (
        {"weight": 0.3},
        {"weight": 1.0, "scope": "both"},
        {"variant": "max-rank", "ranks": 8},
        {"variant": "cumulative", "mass": 0.9},
    )
    return [
        Provider(
            "substitute",
            _build,
            SubstituteOptions,
            lossy=True,
            neutral=lambda model: {"weight": 0},
            trials=trials,
            summary="prefers experts that are in memory",
        )
    ]
