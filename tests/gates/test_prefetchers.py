"""The in-tree prefetchers pass their gate, and the gate catches prefetchers that break the contract."""

from __future__ import annotations

from bmoe.testing import PrefetchGates


class TestTemporal(PrefetchGates):
    plugin, provider = "bmoe", "temporal"


class TestTemporalFar(PrefetchGates):
    plugin, provider = "bmoe", "temporal"
    options = {"depth": 3}


class TestStaleGate(PrefetchGates):
    plugin, provider = "bmoe", "stale-gate"
    options = {"worker": False}


class TestStaleGateOfTheNextLayer(PrefetchGates):
    plugin, provider = "bmoe", "stale-gate"
    options = {"worker": False, "depth": 1, "reads": 2, "keep": 3}


class TestStaleGateInAThread(PrefetchGates):
    plugin, provider = "bmoe", "stale-gate"


class TestEdgeMoE(PrefetchGates):
    plugin, provider = "bmoe", "edgemoe"


class TestEdgeMoEExact(PrefetchGates):
    plugin, provider = "bmoe", "edgemoe"
    options = {"order": "exact", "reads": 3}


class TestHot(PrefetchGates):
    plugin, provider = "bmoe", "hot"


class TestHotFar(PrefetchGates):
    plugin, provider = "bmoe", "hot"
    options = {"half_life": 2.5, "least": 0.0, "depth": 8}
