"""A budget of experts per layer for a batch: what all tokens together want most is a shortlist, and no other is read.

``truncation`` leaves out what is not on the list, ``substitution`` gives the slot to the token's best expert that is.
A token none of whose experts are on the list takes its best one there. Source: MoE-Spec, arXiv 2602.16052, which ranks
by the sum of the router's probabilities over a tree of drafted tokens; ``path`` weighs each token by how likely it is.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Options, Routing, RoutingPolicy
from bmoe.errors import PluginError
from bmoe_plugins.routing._place import place

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class MoeSpecOptions(Options):
    """The budget and what becomes of the rest."""

    experts: int = Field(ge=1, description="experts of a layer that a batch may use; all of them is neutral")
    policy: Literal["substitution", "truncation"] = Field(default="substitution", description="what the rest becomes")
    score: Literal["sum", "max", "path"] = Field(default="sum", description="how a batch ranks the experts")
    protect: bool = Field(default=False, description="keep every token's best expert, beyond the budget if need be")
    scope: Literal["verify", "prefill", "both"] = Field(default="both", description="where it acts")


class MoeSpec:
    """Holds the experts of each routing of several tokens to a shortlist."""

    wants: frozenset[str] = frozenset()

    def __init__(self, options: MoeSpecOptions) -> None:
        self._options = options
        self.phases = frozenset({"verify", "prefill"} if options.scope == "both" else {options.scope})

    def apply(self, routing: Routing, /) -> None:
        listed, used = self._shortlist(routing), routing.ids.shape[1]
        for token in (~listed[routing.ids]).any(axis=1).nonzero()[0].tolist():
            chosen = [e for e in routing.ids[token].tolist() if listed[e]]
            wanted = used if self._options.policy == "substitution" else max(1, len(chosen))
            others = (e for e in routing.ranking[token].tolist() if listed[e] and e not in chosen)
            place(routing, token, [*chosen, *islice(others, wanted - len(chosen))])

    def _shortlist(self, routing: Routing) -> NDArray[np.bool_]:
        """Which experts the batch may use, bool [n_expert]."""
        weighed = routing.probs
        if self._options.score == "path" and len(routing.batch.path_probability) == len(weighed):
            weighed = (weighed.T * routing.batch.path_probability).T
        ranked = weighed.max(axis=0) if self._options.score == "max" else weighed.sum(axis=0)
        listed: NDArray[np.bool_] = routing.resident.copy()
        listed[:] = False
        listed[(-ranked).argsort(kind="stable")[: self._options.experts]] = True
        if self._options.protect:
            listed[routing.ranking[:, 0]] = True
        return listed


def _build(options: MoeSpecOptions, facts: Facts, /) -> RoutingPolicy:
    most = max((bank.n_expert for bank in facts.model.banks), default=options.experts)
    if options.experts > most:
        said = f"options.experts = {options.experts} is above the {most} experts of a layer"
        raise PluginError(f"{said}; give at most {most}")
    return MoeSpec(options)


@hookimpl
def bmoe_routing() -> list[Provider[RoutingPolicy]]:
    """Return the budget of experts per layer and batch."""
    return [
        Provider(
            "moe-spec",
            _build,
            MoeSpecOptions,
            lossy=True,
            excludes=("routing:edgexpert-prefill",),
            neutral=lambda model: {"experts": model.n_expert},
            trials=({"experts": 3}, {"experts": 3, "policy": "truncation"}, {"experts": 4, "score": "max"}),
            summary="a shortlist of experts for each batch",
        )
    ]
