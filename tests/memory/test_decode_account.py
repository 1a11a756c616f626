"""Decoding holds no more memory than the parts that a person would add up: imports, dense, budget, KV and buffers."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")


UNNAMED = 6 << 20
"""llama.cpp's graphs, pages of libraries and objects of Python that an opened model has: no part names them."""


@pytest.mark.parametrize("budget_mb", [0, 60, 200])
def test_the_peak_of_decoding_is_within_3_percent_of_the_sum(account, budget_mb):
    found = account(f"cache.budget_mb={budget_mb}")

    assert found["parts"]["experts"] >= budget_mb << 20
    assert {"context_KV", "context_compute"} <= set(found["parts"])
    assert found["peaks"]["decode"] is not None
    assert found["peaks"]["decode"] <= 1.03 * found["sum_bytes"] + UNNAMED, found
    # and the run did use what it was given
    assert found["held_bytes"] >= 0.9 * (budget_mb << 20)
    assert found["peaks"]["decode"] >= found["parts"]["baseline"] + 0.9 * (budget_mb << 20)


def test_pages_of_mapped_files_are_told_apart(account):
    found = account("cache.budget_mb=60")
    resident = found["resident"]

    # experts are never in the mapping: what grew of it is at most the dense weights and the headers around them
    assert resident["mapped"] - resident["mapped_before"] <= found["parts"]["dense"] + (8 << 20)
    assert resident["anon"] >= 60 << 20
