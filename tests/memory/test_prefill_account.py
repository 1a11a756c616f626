"""A prompt whose routings need more experts than the budget holds does not take more memory than the budget."""

from __future__ import annotations

import sys

import pytest

from .test_decode_account import UNNAMED

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")


@pytest.mark.parametrize("budget_mb", [0, 40, 60, 200])
def test_the_peak_of_a_wide_prefill_is_within_3_percent_of_the_sum(account, budget_mb):
    """128 tokens use all 48 experts of a layer, 216 MiB, in one go."""
    found = account(f"cache.budget_mb={budget_mb}", prompt=128, tokens=1)

    assert found["peaks"]["prefill"] is not None
    assert found["peaks"]["prefill"] <= 1.03 * found["sum_bytes"] + UNNAMED, found
