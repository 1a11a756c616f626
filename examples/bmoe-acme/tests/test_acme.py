"""The gates that bmoe's own plugins pass, for those of this package."""

from bmoe.testing import ArchGates, CachePolicyGates


class TestOlmoe(ArchGates):
    plugin, provider, arch = "acme", "olmoe", "olmoe"
    thorough = False  # a few combinations of budget, reader and seam; True runs all of them


class TestHotset(CachePolicyGates):
    plugin, provider = "acme", "acme.hotset"
    golden = {"zipf": 4453, "scan": 0, "locality": 3486}


class TestSmallWindow(CachePolicyGates):
    plugin, provider, options = "acme", "acme.hotset", {"window": 128}
    golden = {"zipf": 4146, "scan": 0, "locality": 6092}
