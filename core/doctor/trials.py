"""Probes that compute: two that meet, the model that comes with bmoe, and heat. Each runs in a process of its own."""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from bmoe.doctor.apart import tell
from bmoe.errors import NativeError

_STALL_S = 300e-6
"""A meeting takes microseconds; whoever waits longer waits for a core."""
_WARM, _TOKENS, _ROUNDS = 8, 24, 3
_EDGE_S = 3.0


def probe_barrier(seconds: float) -> dict[str, Any]:
    """``lost``: the share of time in which one of two processes spun because the other had no core."""
    if not hasattr(os, "fork"):
        raise NativeError("this system cannot fork")
    shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
    mine, yours, stop = 0, 64, 128
    until = time.monotonic() + seconds
    child = os.fork()
    if child == 0:
        turn = 0
        while not shared[stop] and time.monotonic() < until + 1:
            if shared[mine] > turn:
                turn = shared[yours] = shared[mine]
        os._exit(0)
    try:
        turns, stalled, longest = 0, 0.0, 0.0
        began = last = time.perf_counter()
        while last - began < seconds:
            turns += 1
            shared[mine] = turns
            while shared[yours] != turns and time.perf_counter() - began < seconds:
                pass
            now = time.perf_counter()
            took, last = now - last, now
            longest = max(longest, took)
            stalled += took if took > _STALL_S else 0.0
    finally:
        shared[stop] = 1
        os.waitpid(child, 0)
    return {"lost": round(stalled / (last - began), 4), "turns": turns, "longest_s": round(longest, 6)}


def probe_threads(counts: Sequence[int]) -> dict[int, float]:
    """Tokens a second of the bundled model, whole in memory, for each number of threads; in turns, the median."""
    from contextlib import ExitStack

    from bmoe.bundled import find_model
    from bmoe.engine import open_engine

    speeds: dict[int, list[float]] = {count: [] for count in counts}
    with ExitStack() as stack:
        opened = {}
        for count in counts:
            overrides = [f"model.threads={count}", "model.ctx=256"]
            engine = stack.enter_context(open_engine("resident", model=find_model("bmoe-ref"), overrides=overrides))
            opened[count] = engine
        for turn in range(_ROUNDS):
            for count in list(counts)[:: 1 if turn % 2 else -1]:
                speeds[count].append(_speed(opened[count]))
    return {count: round(statistics.median(each), 1) for count, each in speeds.items()}


def _speed(engine: Any) -> float:
    """Tokens a second after the first few."""
    with engine.conversation() as conversation:
        seen, began = 0, 0.0
        for _ in conversation.generate("Once upon a time", _WARM + _TOKENS):
            seen += 1
            if seen == _WARM:
                began = time.perf_counter()
        if seen <= _WARM:
            raise NativeError(f"the model ended after {seen} tokens")
        return (seen - _WARM) / (time.perf_counter() - began)


def probe_heat(cores: int, alone_s: float, together_s: float) -> None:
    """Tell, for one thread and for all: work a second of processor time in the first and in the last seconds.

    By processor time and not by the clock: what another process takes is not what heat takes. ``granted`` is the share
    of the cores that we had.
    """
    for count, seconds in ((1, alone_s), (cores, together_s)):
        if seconds <= 0:
            continue
        series: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        began = time.perf_counter()
        workers = [threading.Thread(target=_work, args=(began, seconds, each), daemon=True) for each in series]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        edge = min(_EDGE_S, seconds / 4)
        # the first instants are those of a clock that speeds up
        first, last = _rate(series, 0.3, 0.3 + edge), _rate(series, seconds - edge, seconds)
        granted = sum(cost for each in series for _, cost in each) / (count * seconds)
        phase = {"threads": count, "seconds": seconds, "first": first, "last": last, "granted": round(granted, 3)}
        tell(phase)


def _work(began: float, seconds: float, series: list[tuple[float, float]]) -> None:
    """Multiply small matrices, of which BLAS makes no threads; note the clock and the processor time of every turn."""
    import numpy as np

    left = np.random.default_rng(1).random((100, 48, 48), dtype=np.float32)
    right, out = left.copy(), np.empty_like(left)
    while (now := time.perf_counter() - began) < seconds:
        spent = time.thread_time()
        for _ in range(4):
            np.matmul(left, right, out=out)
        series.append((now, time.thread_time() - spent))


def _rate(series: Sequence[Sequence[tuple[float, float]]], begin: float, end: float) -> float:
    """Turns a second of processor time, over all threads, of what began in a stretch of the clock."""
    spent = [cost for each in series for at, cost in each if begin <= at < end]
    if not spent or sum(spent) <= 0:
        raise NativeError("the processor did nothing in the time")
    return round(len(spent) / sum(spent), 2)
