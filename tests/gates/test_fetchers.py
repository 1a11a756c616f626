"""The in-tree fetchers pass their gate, whole reads and reads in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from bmoe.testing.fetch import FetchGates
from bmoe.testing.target import Shards, Target


@pytest.fixture(name="shards")
def shards_(tmp_path: Path) -> Shards:
    return Shards(tmp_path)


class TestPread(FetchGates):
    plugin, provider = "bmoe", "pread"
    hands_over = False


class TestPreadInPieces(FetchGates):
    plugin, provider, options = "bmoe", "pread", {"piece_kb": 8, "ahead": 3}
    ahead, hands_over = 3, False


class TestAio(FetchGates):
    plugin, provider = "bmoe", "aio"


class TestAioInPieces(FetchGates):
    plugin, provider, options = "bmoe", "aio", {"depth": 16, "piece_kb": 4, "ahead": 4}
    depth, ahead = 16, 4


class TestUring(FetchGates):
    plugin, provider = "bmoe", "uring"


class TestUringInPieces(FetchGates):
    plugin, provider, options = "bmoe", "uring", {"depth": 5, "piece_kb": 8, "ahead": 1}
    depth, ahead = 5, 1


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("gate", [TestPread, TestAio, TestUring])
def test_a_batch_that_nobody_waited_for_does_not_spoil_the_next(shards: Shards, gate: type[FetchGates], lanes: int):
    """Ctrl-C may come after submit and before wait."""
    rows = [(index % 2, index, 1, index // 8) for index in range(24)]
    with gate().open(shards, lanes=lanes) as fetcher, gate().faults() as faults:
        given_up = Target(rows, shards.content)
        fetcher.submit(given_up.batch)
        target = Target(rows[::-1], shards.content)
        ticket = fetcher.submit(target.batch)
        assert faults.in_flight <= len(rows)
        fetcher.wait(ticket, 99)
        assert [] == target.wrong(99)
