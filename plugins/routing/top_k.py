"""Fewer experts per token: the last slots of every token take no part.

With the others making up for them the output is that of the same model with a smaller ``expert_used_count``, byte for
byte where the graph divides the weights by their sum. The plain measure that every other knob has to beat.
"""

from __future__ import annotations

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Options, Routing, RoutingPolicy
from bmoe.errors import PluginError
from bmoe_plugins.routing._scope import Scope, phases


class TopKOptions(Options):
    """How many experts are left, and where."""

    k: int = Field(ge=1, description="experts per token; the model's own number is neutral")
    scope: Scope = Field(default="both", description="where it acts: decode, prefill or both")
    renormalise: bool = Field(default=True, description="whether the others make up for what is left out")


class TopK:
    """Keeps the first ``k`` slots, which are those with most of the router's probability."""

    wants: frozenset[str] = frozenset()

    def __init__(self, options: TopKOptions) -> None:
        self.phases = phases(options.scope)
        self._k, self._renormalise = options.k, options.renormalise

    def apply(self, routing: Routing, /) -> None:
        (routing.dead if self._renormalise else routing.mute)[:, self._k :] = True


def _build(options: TopKOptions, facts: Facts, /) -> RoutingPolicy:
    most = max((bank.n_used for bank in facts.model.banks), default=options.k)
    if options.k > most:
        raise PluginError(f"options.k = {options.k} is above the {most} experts that a token uses; give at most {most}")
    return TopK(options)


@hookimpl
def bmoe_routing() -> list[Provider[RoutingPolicy]]:
    """Return the knob that leaves out the last experts of each token."""
    return [
        Provider(
            "top-k",
            _build,
            TopKOptions,
            lossy=True,
            neutral=lambda model: {"k": model.n_used},
            trials=({"k": 1}, {"k": 1, "renormalise": False}, {"k": 1, "scope": "decode"}),
            summary="fewer experts per token",
        )
    ]
