"""Skip an expert that is not in memory if the router gives it little: below a share of what an even split would be.

The token's best expert is never skipped. Source: BigMoeOnEdge, cache-aware expert dropping.
"""

from __future__ import annotations

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Options, Routing, RoutingPolicy
from bmoe_plugins.routing._scope import Scope, phases


class DropColdOptions(Options):
    """What is little, and where."""

    share: float = Field(ge=0, le=1, allow_inf_nan=False, description="part of an even split; 0 is neutral")
    scope: Scope = Field(default="decode", description="where it acts: decode, prefill or both")
    renormalise: bool = Field(default=True, description="whether the others make up for what is skipped")


class DropCold:
    """Skips slots that would have to be read, have less than ``share / n_used`` of the token, and are not its first."""

    wants: frozenset[str] = frozenset()

    def __init__(self, options: DropColdOptions) -> None:
        self.phases = phases(options.scope)
        self._share, self._renormalise = options.share, options.renormalise

    def apply(self, routing: Routing, /) -> None:
        cold = (routing.shares < self._share / routing.ids.shape[1]) & ~routing.resident[routing.ids]
        cold &= ~(routing.dead | routing.mute)
        rows = range(len(cold))
        cold[rows, routing.shares.argmax(axis=1)] = False
        target = routing.dead if self._renormalise else routing.mute
        target |= cold


def _build(options: DropColdOptions, facts: Facts, /) -> RoutingPolicy:
    return DropCold(options)


@hookimpl
def bmoe_routing() -> list[Provider[RoutingPolicy]]:
    """Return the knob that skips unimportant misses."""
    return [
        Provider(
            "drop-cold",
            _build,
            DropColdOptions,
            lossy=True,
            neutral=lambda model: {"share": 0},
            trials=({"share": 1.0}, {"share": 1.0, "renormalise": False}, {"share": 0.9, "scope": "both"}),
            summary="skips misses with a small share",
        )
    ]
