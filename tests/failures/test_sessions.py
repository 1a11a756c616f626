"""Many engines one after another leave nothing behind, and two at once do not know of each other."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from pathlib import Path

import pytest

import bmoe
from bmoe.native import memory

from .runs import EVICTING, LONG, PROFILE, PROMPT, run

LIBC = ctypes.CDLL(None)
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is open is told by /proc")


def footprint() -> tuple[int, int, int]:
    """Open descriptors, mappings and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), memory.count_mappings(), len(os.listdir("/proc/self/task"))


def cycles(model: str, count: int, *overrides: str) -> None:
    for _ in range(count):
        with bmoe.open(PROFILE, model, [EVICTING, *overrides]) as engine, engine.conversation() as conversation:
            assert 2 == len(list(conversation.generate(PROMPT, 2)))


def rss() -> int:
    """Resident bytes, without what the C library keeps of freed memory: heaps fragment, which is no leak."""
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * memory.PAGE


@LINUX
@pytest.mark.parametrize("fetcher", ["auto", "pread"])
def test_opening_and_closing_leaves_no_descriptor_mapping_or_thread(model: str, fetcher: str) -> None:
    check(model, fetcher, 40)


@LINUX
@pytest.mark.slow
def test_a_thousand_times_opened_and_closed(model: str) -> None:
    check(model, "auto", 1000)


def check(model: str, fetcher: str, count: int) -> None:
    cycles(model, 10, f"fetch.plugin={fetcher}", "cache.watch=shrink")
    before, memory_before = footprint(), rss()
    cycles(model, count, f"fetch.plugin={fetcher}", "cache.watch=shrink")
    after, memory_after = footprint(), rss()

    assert (before[0], before[2]) == (after[0], after[2])
    # the allocator may keep a few arenas; a mapping per cycle would be as many as there were cycles
    assert after[1] - before[1] <= count // 8
    assert memory_after - memory_before <= (16 << 20) + count * (8 << 10)


def test_two_engines_at_once_in_two_threads_give_the_logits_of_fresh_runs(model: str, expected: dict[str, str]) -> None:
    found: dict[str, list[str]] = {"small": [], "large": []}
    failed: list[BaseException] = []
    meet = threading.Barrier(2, timeout=60)

    def session(name: str, *overrides: str) -> None:
        try:
            with bmoe.open(PROFILE, model, overrides) as engine, engine.conversation() as conversation:
                meet.wait()
                for _ in range(4):
                    found[name].append(run(conversation))
                    found[name].append(run(conversation, LONG))
                assert engine.stream is not None
                store = engine.stream.store
                assert store.held_bytes <= store.budget_bytes
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=session, args=("small", EVICTING, "fetch.plugin=pread")),
        threading.Thread(target=session, args=("large", "cache.budget_mb=100")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failed
    assert {"small": [expected["PROMPT"], expected["LONG"]] * 4} == {"small": found["small"]}
    assert found["small"] == found["large"]
