"""The in-tree prefetchers pass their gate, and the gate catches prefetchers that break the contract."""

from __future__ import annotations

from bmoe.testing import PrefetchGates


class TestTemporal(PrefetchGates):
    plugin, provider = "bmoe", "temporal"


class TestTemporalFar(PrefetchGates):
    plugin, provider = "bmoe", "temporal"
    options = {"depth": 3}
