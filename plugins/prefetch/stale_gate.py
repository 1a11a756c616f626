"""Stale-gate prefetch: a later layer's router is asked about the input of an earlier one.

The residual stream changes little from layer to layer, so a router that sees it too early is right for most of its
experts. Source: BigMoeOnEdge's predictive prefetch; Eliseev and Mazur, arXiv 2312.17238. Other than there, selection
bias and groups of experts count, and the check of the ranking begins with the first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field, model_validator

from bmoe import Provider, hookimpl
from bmoe.contracts import BankFacts, ExpertKey, Facts, Options, Prefetcher, RoutingEvent
from bmoe.routers import Router, read_routers
from bmoe_plugins.prefetch._entries import by_layer, entries
from bmoe_plugins.prefetch._newest import NewestFirst

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_DENSE, _EVERY, _ENOUGH, _AGREE = 2, 64, 48, 0.9
"""The first tokens are checked in every layer, until enough experts were compared, later every so many routings; this
share of them has to be the model's own choice."""


class StaleGateOptions(Options):
    """How far it looks, how much it asks for, and where it ranks."""

    depth: int = Field(default=2, ge=1, le=2, description="layers from the input to the router that is asked")
    reads: int | None = Field(default=None, ge=0, le=64, description="best ranked to read; default: as many as used")
    keep: int | None = Field(default=None, ge=0, le=64, description="best ranked to keep in memory; the same default")
    worker: bool = Field(default=True, description="rank in a thread of its own, which needs depth = 2")

    @model_validator(mode="after")
    def _in_time(self) -> StaleGateOptions:
        if self.worker and self.depth < 2:
            raise ValueError("depth = 1 is ranked too late by a worker; set worker = false, or depth = 2")
        return self


class _Job(NamedTuple):
    """The input of ``source``'s layer, by which ``target`` is to rank."""

    source: Router
    target: Router
    x: NDArray[np.float32]


class StaleGate:
    """Ranks by ``routers``, one per routed layer; ``banks`` are those of the trunk."""

    wants = frozenset({"topk", "activation"})

    def __init__(self, routers: Mapping[int, Router], banks: Sequence[BankFacts], options: StaleGateOptions) -> None:
        self.note = ""
        self._routers, self._depth = routers, options.depth
        self._layers = sorted(routers)
        self._place = {layer: place for place, layer in enumerate(self._layers)}
        self._banks = by_layer(banks)
        self._reads, self._keep = options.reads, options.keep
        self._found: dict[int, list[int]] = {}
        self._worker = NewestFirst(self._rank) if options.worker else None
        self._seen = self._checked = self._agreed = 0

    def observe(self, event: RoutingEvent, /) -> None:
        if event.bank or event.batch.phase != "decode" or not len(event.ids) or self.note:
            return
        place = self._place[event.layer]
        if event.activation is None:
            self.note = f"the graph does not show what the router of layer {event.layer} sees; stale-gate needs that"
            return
        x = event.activation[-1].copy()
        self._seen += 1
        if self._seen <= _DENSE * len(self._layers) or self._checked < _ENOUGH or self._seen % _EVERY == 0:
            self._check(event, x)
        if place == 0:
            self._found.clear()
        if place + self._depth < len(self._layers) and not self.note:
            job = _Job(self._routers[event.layer], self._routers[self._layers[place + self._depth]], x)
            if self._worker is not None:
                self._worker.submit(job)
            else:
                self._rank(job)

    def suggest(self, layer: int, /) -> Sequence[ExpertKey]:
        if self._worker is not None:
            self._worker.check()
        return self._coming(layer, self._reads)

    def retain(self, layer: int, /) -> Sequence[ExpertKey]:
        """The best of what is to come."""
        return self._coming(layer, self._keep)

    def wait(self) -> None:
        """Until all that was seen is ranked."""
        if self._worker is not None:
            self._worker.wait()

    def close(self) -> None:
        """End the thread."""
        if self._worker is not None:
            self._worker.close()

    def _rank(self, job: _Job) -> None:
        self._found[job.target.layer] = job.target.rank(job.target.translate(job.x, job.source)).tolist()

    def _coming(self, layer: int, limit: int | None) -> list[ExpertKey]:
        """Entries of the layers after this one that were ranked in time."""
        place, keys = self._place[layer], list[ExpertKey]()
        for target in self._layers[place + 1 : place + 1 + self._depth] if not self.note else ():
            banks = self._banks[target]
            keys += entries(banks, self._found.get(target, [])[: banks[0].n_used if limit is None else limit])
        return keys

    def _check(self, event: RoutingEvent, x: NDArray[np.float32]) -> None:
        """Whether this layer's own router, with its own input, chooses what the model chose."""
        chosen = set((event.ids if event.own is None else event.own)[-1].tolist())
        self._checked += len(chosen)
        self._agreed += len(chosen & set(self._routers[event.layer].rank(x)[: len(chosen)].tolist()))
        if self._checked >= _ENOUGH and self._agreed < _AGREE * self._checked:
            self.note = f"its ranking agrees with {self._agreed} of {self._checked} of the model's choices; report it"


def _build(options: StaleGateOptions, facts: Facts, /) -> Prefetcher:
    return StaleGate(read_routers(facts.model), facts.model.banks, options)


@hookimpl
def bmoe_prefetchers() -> list[Provider[Prefetcher]]:
    """Return the stale-gate prefetcher."""
    summary = "reads what a later layer's router chooses by the input of this one"
    return [Provider("stale-gate", _build, StaleGateOptions, summary=summary)]
