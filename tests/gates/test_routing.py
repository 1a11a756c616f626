"""The in-tree routing policies pass their gate, and the gate catches policies that break the contract."""

from __future__ import annotations

from bmoe.testing import RoutingGates


class TestTopK(RoutingGates):
    plugin, provider = "bmoe", "top-k"
    biting = ({"k": 1}, {"k": 1, "renormalise": False}, {"k": 1, "scope": "decode"}, {"k": 1, "scope": "prefill"})

    def neutral_for(self, model):
        return {"k": model.n_used}


class TestDropCold(RoutingGates):
    plugin, provider = "bmoe", "drop-cold"
    neutral = {"share": 0}
    biting = ({"share": 1.0}, {"share": 1.0, "renormalise": False}, {"share": 0.9, "scope": "both"})


class TestSubstitute(RoutingGates):
    plugin, provider = "bmoe", "substitute"
    neutral = {"weight": 0}
    biting = (
        {"weight": 0.3},
        {"weight": 1.0, "scope": "both"},
        {"variant": "max-rank", "ranks": 8},
        {"variant": "cumulative", "mass": 0.9},
    )


class TestSubstituteByRank(RoutingGates):
    plugin, provider = "bmoe", "substitute"
    neutral = {"variant": "max-rank", "ranks": 0}
    biting = ({"variant": "max-rank", "ranks": 6, "scope": "prefill"},)


class TestMoeSpec(RoutingGates):
    plugin, provider = "bmoe", "moe-spec"
    biting = ({"experts": 3}, {"experts": 3, "policy": "truncation"}, {"experts": 4, "score": "max"})
    keeps_best = False

    def neutral_for(self, model):
        return {"experts": model.n_expert}


class TestMoeSpecProtected(RoutingGates):
    plugin, provider = "bmoe", "moe-spec"
    biting = ({"experts": 3, "protect": True}, {"experts": 3, "protect": True, "policy": "truncation"})

    def neutral_for(self, model):
        return {"experts": model.n_expert, "protect": True}


class TestEdgexpertPrefill(RoutingGates):
    plugin, provider = "bmoe", "edgexpert-prefill"
    biting = (
        {"importance": "position"},
        {"importance": "uniform", "low": 2.0, "high": 2.0, "trivial": [2, 1]},
        {"importance": "uniform", "low": 2.0, "high": 2.0, "trivial": [3, 1], "scope": "ubatch"},
    )

    def neutral_for(self, model):
        whole = [model.n_used, model.n_used]
        return {"importance": "position", "major": whole, "minor": whole, "trivial": whole}


class TestRouteAhead(RoutingGates):
    plugin, provider = "bmoe", "route-ahead"
    neutral = {"depth": 0}
    biting = ({"depth": 1}, {"depth": 2})
    needs = {"prefetch": {"policy": "stale-gate", "options": {"worker": False, "depth": 1}}}
    keeps_best = False
    ranks = True
