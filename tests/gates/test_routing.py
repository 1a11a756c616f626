"""The in-tree routing policies pass their gate, and the gate catches policies that break the contract."""

from __future__ import annotations

import random

import pytest

from bmoe.contracts import Options, Provider, Routing
from bmoe.testing import RoutingGates
from bmoe.testing.inputs import Inputs


class TestTopK(RoutingGates):
    plugin, provider = "bmoe", "top-k"
    keeps_best = True


class TestDropCold(RoutingGates):
    plugin, provider = "bmoe", "drop-cold"
    keeps_best = True


class TestSubstitute(RoutingGates):
    plugin, provider = "bmoe", "substitute"
    keeps_best = True


@pytest.mark.slow
class TestSubstituteInThePrompt(RoutingGates):
    plugin, provider = "bmoe", "substitute"
    biting = ({"variant": "max-rank", "ranks": 6, "scope": "prefill"},)
    keeps_best = True

    def neutral_for(self, model):
        return {"variant": "max-rank", "ranks": 0}


class TestMoeSpec(RoutingGates):
    plugin, provider = "bmoe", "moe-spec"


@pytest.mark.slow
class TestMoeSpecProtected(RoutingGates):
    plugin, provider = "bmoe", "moe-spec"
    biting = ({"experts": 3, "protect": True}, {"experts": 3, "protect": True, "policy": "truncation"})
    keeps_best = True

    def neutral_for(self, model):
        return {"experts": model.n_expert, "protect": True}


class TestEdgexpertPrefill(RoutingGates):
    plugin, provider = "bmoe", "edgexpert-prefill"
    keeps_best = True


class TestRouteAhead(RoutingGates):
    plugin, provider = "bmoe", "route-ahead"


@pytest.mark.slow
class TestRouteAheadOfTheNextLayer(RoutingGates):
    plugin, provider = "bmoe", "route-ahead"
    biting = ({"depth": 1},)
    needs = {"prefetch": {"policy": "stale-gate", "options": {"worker": False, "depth": 1}}}


# ---- what the gate finds


class Cuts:
    """Leaves out the last slot, and what a test adds to it."""

    phases = frozenset({"decode", "prefill"})
    wants: frozenset[str] = frozenset()

    def __init__(self, what: str, on: bool) -> None:
        self.what, self.on, self.calls = what, on, 0

    def apply(self, routing: Routing, /) -> None:
        self.calls += 1
        if self.on or self.what == "never neutral":
            routing.dead[:, -1] = True
        if self.what == "all dead":
            routing.dead[:] = True
        elif self.what == "twice":
            routing.dead[:] = False
            routing.ids[:, -1] = routing.ids[:, 0]
        elif self.what == "writes":
            routing.probs[:] = 0
        elif self.what == "inert":
            routing.dead[:] = False
        elif self.what == "random":
            routing.dead[:, -1] = random.random() < 0.5


class Cut(Options):
    on: bool = False


def gate(what: str, *, lossy: bool = True) -> RoutingGates:
    provider = Provider(
        "cuts",
        lambda options, facts: Cuts(what, options.on),
        Cut,
        lossy=lossy,
        neutral=lambda model: {"on": False},
        trials=({"on": True},),
    )
    made = {"plugin": "bmoe", "provider": "cuts", "load": lambda self: provider, "__test__": False}
    found: RoutingGates = type("_Gate", (RoutingGates,), made)()
    return found


def test_a_policy_that_keeps_the_contract_passes():
    good = gate("")
    good.test_says_that_it_is_lossy()
    good.test_every_setting_that_bites_does(Inputs(None))
    good.test_what_it_leaves_can_be_computed(Inputs(None))
    good.test_it_writes_only_what_it_may(Inputs(None))
    good.test_is_deterministic(Inputs(None))


def test_one_that_says_to_be_lossless_is_found():
    with pytest.raises(AssertionError):
        gate("", lossy=False).test_says_that_it_is_lossy()


def test_one_that_never_bites_is_found():
    with pytest.raises(AssertionError, match="never changes a routing"):
        gate("inert").test_every_setting_that_bites_does(Inputs(None))


@pytest.mark.parametrize(("what", "told"), [("all dead", "without an expert"), ("twice", "chosen twice")])
def test_one_that_leaves_what_cannot_be_computed_is_found(what, told):
    with pytest.raises(AssertionError, match=told):
        gate(what).test_what_it_leaves_can_be_computed(Inputs(None))


def test_one_that_writes_what_is_for_reading_is_found():
    with pytest.raises(AssertionError, match="probs was written to"):
        gate("writes").test_it_writes_only_what_it_may(Inputs(None))


def test_one_that_draws_lots_is_found():
    with pytest.raises(AssertionError):
        gate("random").test_is_deterministic(Inputs(None))
