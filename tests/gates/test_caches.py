"""The in-tree cache policies pass their gate, and the gate catches policies that break the contract."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from bmoe.contracts import CachePolicy, ExpertKey, Provider, Remembering, RoutingEvent
from bmoe.errors import PluginError
from bmoe.testing import CachePolicyGates
from bmoe_plugins.caches.lru import Lru
from tests.gates.naive_caches import (
    NaiveArc,
    NaiveEdgeMoe,
    NaiveHistory,
    NaiveLfu,
    NaiveLru,
    NaiveNextUse,
    NaiveNone,
    NaiveRouterEma,
    NaiveS3Fifo,
    NaiveSieve,
)


class TestLru(CachePolicyGates):
    plugin, provider = "bmoe", "lru"
    naive = NaiveLru
    golden: ClassVar = {"zipf": 3817, "scan": 0, "locality": 6063}


class TestNone(CachePolicyGates):
    plugin, provider = "bmoe", "none"
    naive = NaiveNone
    ranks_by_use = False
    golden: ClassVar = {"zipf": 3335, "scan": 0, "locality": 5947}


class TestLfu(CachePolicyGates):
    plugin, provider = "bmoe", "lfu"
    naive = NaiveLfu
    golden: ClassVar = {"zipf": 4409, "scan": 0, "locality": 3330}


class TestDecay(CachePolicyGates):
    plugin, provider = "bmoe", "decay"
    naive = NaiveHistory
    golden: ClassVar = {"zipf": 4406, "scan": 0, "locality": 5455}


class TestNextUse(CachePolicyGates):
    plugin, provider = "bmoe", "next-use"
    naive = NaiveNextUse
    golden: ClassVar = {"zipf": 4469, "scan": 0, "locality": 5494}


class TestRouterEma(CachePolicyGates):
    plugin, provider = "bmoe", "router-ema"
    naive = NaiveRouterEma
    golden: ClassVar = {"zipf": 4466, "scan": 0, "locality": 6084}


class TestEdgeMoe(CachePolicyGates):
    plugin, provider = "bmoe", "edgemoe"
    naive = NaiveEdgeMoe
    golden: ClassVar = {"zipf": 4472, "scan": 0, "locality": 4429}


class TestEdgeMoeAsPrinted(CachePolicyGates):
    plugin, provider = "bmoe", "edgemoe"
    options: ClassVar = {"formula": "literal"}
    golden: ClassVar = {"zipf": 4355, "scan": 0, "locality": 4269}


class TestSieve(CachePolicyGates):
    plugin, provider = "bmoe", "sieve"
    naive = NaiveSieve
    golden: ClassVar = {"zipf": 4122, "scan": 0, "locality": 2731}


class TestS3Fifo(CachePolicyGates):
    plugin, provider = "bmoe", "s3fifo"
    naive = NaiveS3Fifo
    golden: ClassVar = {"zipf": 4250, "scan": 0, "locality": 5775}


class TestArc(CachePolicyGates):
    plugin, provider = "bmoe", "arc"
    naive = NaiveArc
    golden: ClassVar = {"zipf": 4053, "scan": 0, "locality": 6017}


def docs_example() -> dict[str, Any]:
    """What the Python blocks of docs/how-to/write-a-cache-policy.md define, word for word, in one name space."""
    page = (Path(__file__).parents[2] / "docs/how-to/write-a-cache-policy.md").read_text("utf-8")
    names: dict[str, Any] = {"__name__": "bmoe_acme"}
    for block in page.split("```python\n")[1:]:
        exec(block.split("```")[0], names)
    return names


class TestTheExampleOfTheDocs(docs_example()["TestHotset"]):  # type: ignore[misc]
    """The page's gate passes for the page's plugin, which is not installed here."""

    def load(self) -> Provider[CachePolicy]:
        (provider,) = docs_example()["bmoe_caches"]()
        assert provider.name == self.provider
        return cast("Provider[CachePolicy]", provider)


def test_the_replay_of_the_docs_is_right() -> None:
    names = docs_example()
    assert 0 < names["played"].hits <= names["bound"] < names["played"].lookups


@pytest.mark.parametrize("name", ["next-use", "decay", "router-ema"])
def test_a_policy_that_is_told_of_earlier_runs_gives_up_first_what_they_used_least(name: str) -> None:
    class Told(CachePolicyGates):
        plugin, provider = "bmoe", name

    policy = Told().build(8)
    assert isinstance(policy, Remembering)
    keys = [2 << 24 | expert for expert in range(4)]
    chances = dict(zip(keys, (0.9, 0.1, 0.5, 0.02), strict=True))
    policy.remember(chances)
    for key in sorted(chances, key=lambda key: -chances[key]):
        policy.admit(key, True)
    given_up = []
    for _ in keys:
        victim = policy.victim(frozenset())
        assert victim is not None
        policy.forget(victim)
        given_up.append(chances[victim])
    assert given_up == sorted(chances.values())


# ---- broken policies, each with the test that has to notice


class Inert(Lru):
    """Never names anything."""

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        return None


class Unmoved(Lru):
    """Loses its touches, so that it is first in, first out, but says that it ranks by use."""

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        """Lose them."""


class EvictsPinned(Lru):
    """Names the coldest entry even if the layer in flight needs it."""

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        return super().victim(())


class ForgetsWrongly(Lru):
    """Keeps an entry that is gone, if it was the last one used."""

    def forget(self, key: ExpertKey, /) -> None:
        if self._order and next(reversed(self._order)) != key:
            super().forget(key)


class ForgetsOnce(Lru):
    """Cannot be told to forget what it does not know."""

    def forget(self, key: ExpertKey, /) -> None:
        del self._order[key]


class Undetermined(Lru):
    """Draws from the process's random state."""

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        free = [key for key in self._order if key not in pinned]
        return random.choice(free) if free else None


class Hoarder(Lru):
    """Would beat any bound: it gives nothing up while a hit may still come."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = 0

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        self._asked += 1
        return None if self._asked > 10 else super().victim(pinned)


class Impatient(Lru):
    """Asking it for a victim changes what it answers next."""

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        victim = super().victim(pinned)
        if victim is not None:
            self._order.move_to_end(victim)
        return victim


class Modest(Lru):
    """Keeps the cold half of a cycle, which it denies."""

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        return next((key for key in reversed(self._order) if key not in pinned), None)


class Boastful(Lru):
    """Says that it has hits below one cycle."""

    below_cycle = True


class MostRecentFirst(Modest):
    """A real policy, but not the one that its naive model describes."""


class Blind(Lru):
    """Asks for what the router gave and does not look at it."""

    wants = frozenset({"probs"})

    def observe(self, event: RoutingEvent, /) -> None:
        """Look away."""


class KeepsViews(Blind):
    """Ranks by what it saw last, in memory that is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, Any] = {}

    def observe(self, event: RoutingEvent, /) -> None:
        self._seen[event.layer] = event.probs

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        free = [key for key in self._order if key not in pinned]
        return min(free, key=lambda key: (self._seen[key >> 24][0, key & 0xFFFF], key), default=None)


class Overasks(Blind):
    """Wants what no graph has."""

    wants = frozenset({"probs", "thoughts"})


class Unasked(Lru):
    """Wants to see, and cannot be shown."""

    wants = frozenset({"probs"})


def gates(policy: Callable[[], CachePolicy]) -> CachePolicyGates:
    """The gate of a policy that is not installed."""

    class Broken(CachePolicyGates):
        plugin = provider = "broken"
        naive = NaiveLru

        def load(self) -> Provider[CachePolicy]:
            return Provider("broken", lambda options, facts: policy())

    return Broken()


@pytest.mark.parametrize(
    ("policy", "check"),
    [
        (Inert, lambda g: g.test_was_exercised("zipf")),
        (Inert, lambda g: g.test_victim_is_resident_and_not_pinned_whatever_happens()),
        (Unmoved, lambda g: g.test_was_exercised("zipf")),
        (EvictsPinned, lambda g: g.test_victim_is_resident_and_not_pinned_whatever_happens()),
        (ForgetsWrongly, lambda g: g.test_victim_is_resident_and_not_pinned_whatever_happens()),
        (ForgetsOnce, lambda g: g.test_victim_is_resident_and_not_pinned_whatever_happens()),
        (Undetermined, lambda g: g.test_is_deterministic("locality")),
        (Hoarder, lambda g: g.test_hits_are_possible("zipf")),
        (Impatient, lambda g: g.test_victim_changes_nothing()),
        (Modest, lambda g: g.test_below_cycle_is_true()),
        (Boastful, lambda g: g.test_below_cycle_is_true()),
        (Blind, lambda g: g.test_what_it_sees_decides()),
        (KeepsViews, lambda g: g.test_keeps_no_view()),
        (Overasks, lambda g: g.test_wants_what_is_offered()),
        (Unasked, lambda g: g.test_wants_what_is_offered()),
        (MostRecentFirst, lambda g: g.test_equals_its_naive_model()),
    ],
)
def test_a_broken_policy_is_caught(
    policy: Callable[[], CachePolicy], check: Callable[[CachePolicyGates], None]
) -> None:
    with pytest.raises((AssertionError, PluginError, KeyError)):
        check(gates(policy))


def test_a_missing_golden_fails_and_prints_what_to_record() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"golden = \{\.\.\., 'zipf': \d+\}"):
        gates(Lru).test_golden_hits("zipf")


def test_a_changed_golden_fails() -> None:
    gate = gates(Lru)
    type(gate).golden = {"zipf": 1}
    with pytest.raises(AssertionError):
        gate.test_golden_hits("zipf")


def test_a_denied_use_of_touches_fails() -> None:
    gate = gates(Lru)
    type(gate).ranks_by_use = False
    with pytest.raises(AssertionError, match="use changes the victims"):
        gate.test_was_exercised("zipf")


def test_a_gate_names_a_provider_that_exists() -> None:
    class Misspelt(CachePolicyGates):
        plugin, provider = "bmoe", "lur"

    with pytest.raises(PluginError, match="lur"):
        Misspelt().load()


@pytest.fixture(name="umbra")
def _umbra(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the fake distribution look installed, and forget its modules afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "umbra"]:
        del sys.modules[name]


@pytest.mark.usefixtures("umbra")
def test_a_gate_finds_a_plugin_that_is_installed() -> None:
    class Umbra(CachePolicyGates):
        plugin, provider = "umbra", "umbra.hotset"

    assert Umbra().loaded.name == "umbra.hotset"
    Umbra.provider = "umbra.hotsat"
    with pytest.raises(PluginError, match=r"no cache 'umbra\.hotsat'; it provides: umbra\.hotset"):
        Umbra().load()
