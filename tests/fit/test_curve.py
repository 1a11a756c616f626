"""The hit curve: what is recorded is given back, more memory never hits less, and the file is what its script makes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.contracts import CacheFacts, Facts, FetchFacts, ModelFacts
from bmoe.fit.curve import expected_hits, reference
from bmoe.plugins import load_all
from bmoe.registry import load_registry
from bmoe.replay import replay
from bmoe.replay.route_trace import DECODE, PREFILL, read_trace

ROOT = Path(__file__).parents[2]
QWEN, GEMMA, GPTOSS = 17_553_162_240, 15_130_165_248, 60_914_073_600
EXCERPT = ROOT / "tests" / "replay" / "gptoss-excerpt.route.csv"


@pytest.fixture(name="script", scope="module")
def _script():
    spec = importlib.util.spec_from_file_location("make_hit_curve", ROOT / "scripts" / "make_hit_curve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# published with the traces: MiB of the cache and LRU's hit rate, and the bytes of all experts as their headers say them
PUBLISHED = [
    ("qwen", 6, 2000, 0.565, QWEN),
    ("qwen", 6, 4000, 0.803, QWEN),
    ("gemma", 6, 2000, 0.622, GEMMA),
    ("gemma", 6, 4000, 0.819, GEMMA),
    ("gptoss", 2, 2000, 0.309, GPTOSS),
    ("gptoss", 2, 3000, 0.448, GPTOSS),
]


@pytest.mark.parametrize(("trace", "used", "mib", "expected", "total"), PUBLISHED)
def test_the_published_figures_are_on_the_curve(trace, used, mib, expected, total):
    curve = next(c for c in reference() if (c.policy, c.trace, c.used) == ("lru", trace, used))

    assert expected == pytest.approx(curve.at(mib * 2**20 / total), abs=0.015)


@given(
    experts=st.sampled_from([8, 32, 64, 128, 256, 512]),
    used=st.integers(1, 16),
    shares=st.lists(st.floats(0, 1), min_size=2, max_size=6),
    policy=st.sampled_from(["lru", "next-use"]),
)
def test_more_memory_never_hits_less(experts, used, shares, policy):
    rates = [expected_hits("any", experts, min(used, experts), share, policy) for share in sorted(shares)]

    assert [r.expected for r in rates] == sorted(r.expected for r in rates)
    assert all(-1e-9 <= r.low <= r.expected + 1e-9 <= r.high + 2e-9 <= 1 + 3e-9 for r in rates)


@pytest.mark.parametrize(("experts", "used"), [(128, 8), (128, 4), (64, 8), (256, 8), (32, 4), (512, 10), (8, 2)])
def test_everything_in_memory_hits_always_and_nothing_never(experts, used):
    assert 1.0 == pytest.approx(expected_hits("any", experts, used, 1.0).expected)
    assert 0.0 == expected_hits("any", experts, used, 0.0).expected
    assert 0.0 == expected_hits("any", experts, used, 0.9 * used / experts).expected, "less than a token's cycle"


@pytest.mark.parametrize(("trace", "used"), [("qwen", 6), ("gemma", 6), ("gptoss", 2), ("bmoe-ref", 4)])
def test_as_recorded_the_default_policy_never_hits_less_than_lru_and_hits_below_a_tokens_cycle(trace, used):
    lru, own = (
        next(c for c in reference() if (c.policy, c.trace, c.used) == (policy, trace, used))
        for policy in ("lru", "next-use")
    )
    assert all(mine >= theirs for mine, theirs in zip(own.hit_rates, lru.hit_rates, strict=True))
    assert 0 < expected_hits(trace, own.experts, used, 0.9 * used / own.experts, "next-use").expected


def test_a_policy_without_a_curve_is_taken_for_lru_and_that_is_said():
    lru, other = (expected_hits("any", 128, 4, 0.3, policy) for policy in ("lru", "sieve"))
    assert (lru.expected, True, False) == (other.expected, "under LRU" in other.why, "under LRU" in lru.why)


def test_what_is_extrapolated_is_said():
    assert "extrapolated" in expected_hits("any", 128, 8, 0.3).why
    assert "extrapolated" not in expected_hits("any", 128, 4, 0.3).why


def test_a_model_with_a_trace_of_its_own_has_that():
    own = next(c for c in reference() if c.models and c.policy == "lru")
    share = own.shares[9]

    assert own.hit_rates[9] == expected_hits("bmoe-ref", 32, 4, share).expected
    assert expected_hits("other", 32, 4, share).expected > own.hit_rates[9], "a small model routes less alike"


def test_the_script_replays_as_the_engine_does(script):
    """Its loop without a policy plugin gives what the policy plugin gives."""
    trace = read_trace(EXCERPT)
    prefill, decode = trace.steps(PREFILL), trace.steps(DECODE)
    steps = [*prefill, *decode] if decode else prefill
    provider = load_all(load_registry()).providers["cache"]["lru"]
    none = ModelFacts("", "", "", (), 0, 0, 0, 0, 0, 0, 0, (), ())
    for capacity in (20, 60, 150, 400):
        facts = Facts(none, CacheFacts(0, capacity, 0), FetchFacts((), 1, False, 1))
        found = replay(provider.build(provider.options(), facts), steps, capacity)
        assert found.hit_rate == pytest.approx(script.decode_hits([], steps, trace.n_used, capacity), abs=0.003)
        of_any = script.decode_hits_of("lru", steps[:20], steps[20:], trace.n_used, capacity)
        assert of_any == pytest.approx(script.decode_hits(steps[:20], steps[20:], trace.n_used, capacity), abs=0.003)


def test_the_file_has_a_curve_for_every_number_of_experts(script):
    for policy in ("lru", "next-use"):
        assert [1, 2, 3, 4, 5, 6] == [c.used for c in reference() if (c.trace, c.policy) == ("qwen", policy)]
    assert all(tuple(script.SHARES) == c.shares for c in reference())
