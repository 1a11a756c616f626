"""Which fetcher is fastest with the model's own files: found by reading a little with each, remembered per drive."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bmoe.contracts import Facts, Fetcher, ModelFacts
from bmoe.verdicts import Verdict, recall, remember

_READS, _READ_BYTES, _ROUNDS = 8, 512 << 10, 3
_LEAST_BYTES = 64 << 20
_SECONDS = 0.2
_CLEARLY = 1.25
"""A candidate must beat those that are preferred by this factor: less is noise."""


def probe(candidates: Mapping[str, Callable[[Facts], Fetcher]], facts: Facts, key: str, memory: Path | None) -> Verdict:
    """The fastest of ``candidates``, which are in order of preference.

    At most some 36 MB are read in some 0.2 s. ``key`` names the drive; ``memory`` is the file that remembers, None to
    remember nothing. Whatever goes wrong, with that file or with a candidate, there is a verdict.
    """
    names = list(candidates)
    if len(names) == 1:
        return Verdict(names[0], "the only one that can run here")
    spans = _spans(facts.model)
    if sum(end - begin for _, begin, end in spans) < _LEAST_BYTES:
        return Verdict(names[0], "the model is too small to probe; first in order of preference")
    key = f"{key} {'direct' if facts.fetch.direct else 'buffered'} {facts.fetch.lanes} {','.join(names)}"
    known = recall(memory, "fetch", key, names)
    if known is not None:
        return Verdict(known.name, f"{known.why}, remembered")
    rates = _measure(candidates, facts, spans)
    if not rates:
        return Verdict(names[0], "the probe read nothing; first in order of preference")
    best = next(name for name in names if name in rates and rates[name] * _CLEARLY >= max(rates.values()))
    shown = ", ".join(f"{name} {rates[name] / 1e9:.2f}" for name in names if name in rates)
    verdict = Verdict(best, f"probed: {shown} GB/s")
    if len(rates) == len(names):  # a drive too slow for a turn of each is asked again the next time
        remember(memory, "fetch", key, verdict)
    return verdict


def _spans(model: ModelFacts) -> list[tuple[int, int, int]]:
    """Shard, first and last byte of every tensor of experts."""
    return [(p.shard, p.offset, p.offset + p.stride * b.n_expert) for b in model.banks for p in b.projections]


def _measure(
    candidates: Mapping[str, Callable[[Facts], Fetcher]], facts: Facts, spans: Sequence[tuple[int, int, int]]
) -> dict[str, float]:
    """Bytes per second of each, interleaved, so that all see the same load; never the same place twice."""
    from bmoe.native import memory as pages

    # other places every time the process runs, since what was read before may be in a cache below
    draw = random.Random()
    room = [max(0, (end - pages.round_up(begin)) // _READ_BYTES - 1) for _, begin, end in spans]
    wanted = min(sum(room), len(candidates) * _ROUNDS * _READS)
    drawn: dict[tuple[int, int], None] = {}
    for _ in range(8 * wanted):
        shard, begin, _ = spans[index := draw.choices(range(len(spans)), room)[0]]
        drawn[shard, pages.round_up(begin) + draw.randrange(room[index]) * _READ_BYTES] = None
        if len(drawn) == wanted:
            break
    places = list(drawn)
    took: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        region = pages.reserve(_READS * _READ_BYTES, huge=True)
        stack.callback(region.close)
        pages.fill(region.address, 0, region.nbytes)
        ready = {}
        for name, build in candidates.items():
            with contextlib.suppress(Exception):
                ready[name] = build(facts)
                stack.callback(ready[name].close)
        until = time.perf_counter() + _SECONDS
        for turn in range(_ROUNDS):
            order = list(ready.items())
            for name, fetcher in order[turn % len(order) :] + order[: turn % len(order)] if order else ():
                mine, places = places[:_READS], places[_READS:]
                if len(mine) < _READS or time.perf_counter() > until:
                    break
                try:
                    took.setdefault(name, []).append(_time(fetcher, region.address, mine))
                except Exception:  # noqa: BLE001 - what cannot read is no candidate
                    del ready[name]
                    took[name] = []
    return {name: _READS * _READ_BYTES / statistics.median(each) for name, each in took.items() if each}


def _time(fetcher: Fetcher, address: int, places: Sequence[tuple[int, int]]) -> float:
    import numpy as np

    from bmoe.contracts import ReadBatch

    shard, offset = (np.array(column, dtype=np.int64) for column in zip(*places, strict=True))
    index = np.arange(len(places), dtype=np.int64)
    length = np.full(len(places), _READ_BYTES, dtype=np.int64)
    began = time.perf_counter()
    fetcher.wait(fetcher.submit(ReadBatch(address + index * _READ_BYTES, length, length, offset, shard, index * 0)), 0)
    return time.perf_counter() - began
