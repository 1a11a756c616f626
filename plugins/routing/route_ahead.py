"""Route ahead: a layer's experts are those that its router chooses for the input of an earlier layer.

So what will be needed is known layers before, and can be read meanwhile: the prefetcher `stale-gate` with the same
`depth` ranks alike. The experts get the weights that the layer's own router gives them. Generated tokens only, one at a
time. Source: BigMoeOnEdge, route-ahead, which likewise leaves the first layers alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Options, Routing, RoutingPolicy
from bmoe.errors import PluginError
from bmoe.routers import Router, read_routers
from bmoe_plugins.routing._place import place

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bmoe.plan import Plan

_CHECKED, _AGREE = 48, 0.9
"""So many of the model's choices are compared with the ranking before it is relied on, and this share has to agree."""


class RouteAheadOptions(Options):
    """How far ahead."""

    depth: int = Field(default=2, ge=0, le=8, description="layers to look ahead, as in stale-gate; 0 is neutral")


class RouteAhead:
    """Ranks by ``routers``, one per routed layer, on inputs of the same token."""

    phases = frozenset({"decode"})
    wants = frozenset({"activation"})

    def __init__(self, routers: Mapping[int, Router], depth: int) -> None:
        self._routers, self._depth = routers, depth
        self._layers = sorted(routers)
        self._inputs: dict[int, NDArray[np.float32]] = {}
        self._checked = self._agreed = 0

    def apply(self, routing: Routing, /) -> None:
        if not self._depth or len(routing.ids) != 1:
            self._inputs.clear()
            return
        if routing.activation is None:
            said = "the graph does not show what its router sees, which route-ahead needs"
            raise PluginError(f"layer {routing.layer}: {said}; leave it out")
        at = self._layers.index(routing.layer)
        if at == 0:
            self._inputs.clear()
        x = self._inputs[routing.layer] = routing.activation[0].copy()
        own, router = routing.ids[0].tolist(), self._routers[routing.layer]
        if self._checked < _CHECKED:
            self._check(routing.ranking[0, : len(own)].tolist(), router.rank(x)[: len(own)].tolist())
        earlier = self._layers[at - self._depth] if at >= self._depth else None
        seen = self._inputs.get(earlier) if earlier is not None else None
        if seen is not None and earlier is not None:
            chosen = router.rank(router.translate(seen, self._routers[earlier]))[: len(own)].tolist()
            place(routing, 0, chosen)

    def _check(self, chosen: list[int], ranked: list[int]) -> None:
        """Whether a layer's own router, with its own input, chooses what the model chose."""
        self._checked += len(chosen)
        self._agreed += len(set(chosen) & set(ranked))
        if self._checked >= _CHECKED and self._agreed < _AGREE * self._checked:
            said = f"its ranking agrees with {self._agreed} of {self._checked} of the model's choices"
            raise PluginError(f"route-ahead cannot rank this model's experts: {said}; leave it out and report it")


def _build(options: RouteAheadOptions, facts: Facts, /) -> RoutingPolicy:
    return RouteAhead(read_routers(facts.model), options.depth)


@hookimpl
def bmoe_check_plan(plan: Plan) -> list[str]:
    """It reads ahead by the same layers as it routes, or for nothing."""
    depths = [c.options.depth for c in plan.routing if isinstance(c.options, RouteAheadOptions) and c.options.depth]
    layers, found = len({bank.layer for bank in plan.facts.banks}), list[str]()
    reads = getattr(plan.prefetch.options, "depth", None) if plan.prefetch is not None else None
    if len(depths) > 1:
        found.append("route-ahead is there twice; leave one of them out")
    for depth in depths[:1]:
        if depth >= layers:
            found.append(f"route-ahead looks {depth} layers ahead of {layers}; give at most {layers - 1}")
        elif reads is not None and reads != depth:
            found.append(f"route-ahead has depth = {depth} and prefetch.options.depth = {reads}; make them the same")
    return found


@hookimpl
def bmoe_routing() -> list[Provider[RoutingPolicy]]:
    """Return the knob that routes by an earlier layer's input."""
    return [
        Provider(
            "route-ahead",
            _build,
            RouteAheadOptions,
            lossy=True,
            needs=("prefetch:stale-gate",),
            neutral=lambda model: {"depth": 0},
            trials=({"depth": 2},),
            summary="experts are chosen by the input of an earlier layer",
        )
    ]
