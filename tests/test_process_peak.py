"""The peak of a run is its own: what only opening took is reported apart."""

import mmap
import sys

import pytest

from bmoe.process import ProcessCounters


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
def test_an_earlier_peak_is_forgotten():
    counters = ProcessCounters()
    size = 256 << 20
    with mmap.mmap(-1, size) as area:
        for at in range(0, size, mmap.PAGESIZE):
            area[at] = 1
        high = counters.peak_rss_bytes()
    counters.forget_peak()
    after = counters.peak_rss_bytes()
    counters.close()
    assert high is not None
    assert after is not None
    assert size < high
    assert after < high - size / 2
