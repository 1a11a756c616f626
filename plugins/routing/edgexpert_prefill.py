"""Fewer experts for a prompt: tokens that matter less take experts that tokens before them took.

A prompt's tokens are *major*, *minor* or *trivial* by their importance. In this order, each layer gathers the set of
experts that were taken. A major token takes its best ``n``. Another one takes its best expert, then those of its best
``k`` that are in the set, then the next best, ``n`` in all. So an expert is new only if it is among some token's own
best ``n``: no more are ever read than if every token kept its best ``n``. Source: EdgeXpert, arXiv 2608.05303, whose
8 of 8, 6 of 10 and 4 of 12 for a model with 8 experts per token become shares of the model's own number here, since
the same counts would leave nothing to save in a model that uses 4; thresholds are those of its artifact.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, ModelFacts, Options, Routing, RoutingPolicy
from bmoe.errors import PluginError
from bmoe_plugins.routing._place import place

Group: TypeAlias = tuple[int, int]
"""Among how many of its best experts a token chooses, and how many it takes."""

_GROUPS = ("major", "minor", "trivial")
_SHARES = ((1.0, 1.0), (1.25, 0.75), (1.5, 0.5))
_PROMPTS = 16


class EdgexpertOptions(Options):
    """The groups, what each takes, and how long the set lasts."""

    importance: str = Field(min_length=1, description="scorer that says how much each token of a prompt matters")
    importance_options: dict[str, Any] = Field(default={}, description="options of that scorer")
    high: float = Field(default=0.75, ge=0, allow_inf_nan=False, description="least importance of a major token")
    low: float = Field(
        default=0.35, ge=0, allow_inf_nan=False, validate_default=True, description="least importance of a minor token"
    )
    major: Group | None = Field(default=None, description="[k, n] of major tokens; the model's own number of both")
    minor: Group | None = Field(default=None, description="[k, n] of minor tokens; 5/4 and 3/4 of that")
    trivial: Group | None = Field(default=None, description="[k, n] of the others; 3/2 and 1/2 of that")
    scope: Literal["prompt", "ubatch"] = Field(default="prompt", description="how long the set of experts lasts")

    @field_validator("low")
    @classmethod
    def _below_high(cls, low: float, info: ValidationInfo) -> float:
        high: float = info.data.get("high", math.inf)
        if low > high:
            raise ValueError(f"low = {low} is above high = {high}; give at most that")
        return low

    @field_validator("major", "minor", "trivial")
    @classmethod
    def _possible(cls, group: Group | None) -> Group | None:
        if group is not None and not 1 <= group[1] <= group[0]:
            raise ValueError("is not possible; give [k, n] for n experts among the best k, with 1 <= n <= k")
        return group


class EdgexpertPrefill:
    """Takes over experts within a prompt. A token whose logits are asked for is major, whatever its importance.

    Of the prompts of several conversations, which take turns, the last few are remembered.
    """

    phases = frozenset({"prefill"})
    wants: frozenset[str] = frozenset()

    def __init__(self, options: EdgexpertOptions) -> None:
        self._options = options
        self._taken: OrderedDict[str, dict[tuple[int, int], set[int]]] = OrderedDict()

    def apply(self, routing: Routing, /) -> None:
        count, options = len(routing.ids), self._options
        spec = sizes(options, routing.ids.shape[1], routing.n_expert)
        grouped = self._groups(routing, count)
        taken = self._shared(routing)
        for group, (k, n) in enumerate(spec):
            for token in [token for token in range(count) if grouped[token] == group]:
                out = routing.dead[token] | routing.mute[token]
                slots = (~out).nonzero()[0].tolist()
                best = _candidates(routing, token, k, routing.ids[token, out].tolist())
                chosen = take(best, min(n, len(slots)), taken if group else ())
                taken |= chosen
                place(routing, token, [e for e in best if e in chosen], slots)

    def _groups(self, routing: Routing, count: int) -> list[int]:
        """0, 1 or 2 for each token: major, minor, trivial."""
        importance, is_output = routing.batch.importance, routing.batch.is_output
        if len(importance) != count:
            return [0] * count
        high, low = self._options.high, self._options.low
        by_score = [0 if s >= high or s == math.inf else 1 if s >= low else 2 for s in importance]
        if len(is_output) != count:
            return by_score
        return [0 if output else group for group, output in zip(by_score, is_output, strict=True)]

    def _shared(self, routing: Routing) -> set[int]:
        """The set of this layer, empty at the start of a prompt."""
        batch, layer = routing.batch, (routing.layer, routing.bank)
        prompt = self._taken.setdefault(batch.request_id, {})
        self._taken.move_to_end(batch.request_id)
        while len(self._taken) > _PROMPTS:
            self._taken.popitem(last=False)
        if batch.ubatch == 0 or self._options.scope == "ubatch":
            prompt[layer] = set()
        return prompt.setdefault(layer, set())


def sizes(options: EdgexpertOptions, n_used: int, n_expert: int) -> list[Group]:
    """``(k, n)`` of the three groups for a layer, as given or as shares of ``n_used``, rounded up."""
    found = []
    for name, (wide, few) in zip(_GROUPS, _SHARES, strict=True):
        given: Group = getattr(options, name) or (math.ceil(wide * n_used), math.ceil(few * n_used))
        found.append((min(given[0], n_expert), min(given[1], n_used)))
    return found


def _candidates(routing: Routing, token: int, k: int, away: Sequence[int]) -> list[int]:
    """A token's best ``k`` experts, but for those that are ``away`` and those of groups that are ruled out."""
    best: list[int] = routing.ranking[token, :k].tolist()
    scores: list[float] = routing.scores[token, best].tolist()
    return [e for e, score in zip(best, scores, strict=True) if score > -math.inf and e not in away]


def take(best: Sequence[int], n: int, taken: Collection[int]) -> set[int]:
    """``n`` of a token's ``best`` experts: the first, those that are ``taken``, and then the next best."""
    chosen = {*best[:1]}
    for expert in [*(e for e in best[1:] if e in taken), *best[1:]]:
        if len(chosen) >= n:
            break
        chosen.add(expert)
    return chosen


def _build(options: EdgexpertOptions, facts: Facts, /) -> RoutingPolicy:
    used = max((bank.n_used for bank in facts.model.banks), default=None)
    experts = max((bank.n_expert for bank in facts.model.banks), default=None)
    for name in _GROUPS:
        k, n = getattr(options, name) or (1, 1)
        said = f"options.{name} = {[k, n]}"
        if used is not None and n > used:
            raise PluginError(f"{said} takes more than the {used} experts that a token uses; give at most [k, {used}]")
        if experts is not None and k > experts:
            raise PluginError(f"{said} has more than the {experts} experts of a layer; give at most [{experts}, n]")
    return EdgexpertPrefill(options)


def _neutral(model: ModelFacts) -> dict[str, Any]:
    whole = [model.n_used, model.n_used]
    return {"importance": "uniform", "major": whole, "minor": whole, "trivial": whole}


@hookimpl
def bmoe_routing() -> list[Provider[RoutingPolicy]]:
    """Return the reuse of experts within a prompt."""
    all_trivial = {"importance": "uniform", "low": 2.0, "high": 2.0}
    return [
        Provider(
            "edgexpert-prefill",
            _build,
            EdgexpertOptions,
            lossy=True,
            neutral=_neutral,
            trials=(
                {"importance": "position"},
                {**all_trivial, "trivial": [2, 1]},
                {**all_trivial, "trivial": [3, 1], "scope": "ubatch"},
            ),
            summary="fewer experts for the tokens of a prompt that matter less",
        )
    ]
