"""What the device gives, measured by the fetcher that the engine uses: at random places, and one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from bmoe import plugins
from bmoe.contracts import CacheFacts, Facts, Fetcher, FetchFacts, ModelFacts, ReadBatch
from bmoe.layout import read_model
from bmoe.native import memory
from bmoe.registry import load_registry


def facts_of(model: str) -> ModelFacts:
    """The model's layout."""
    return read_model(model, plugins.load_all(load_registry()).archs)


@contextmanager
def _reading(facts: ModelFacts, fetcher: str, nbytes: int, batch: int) -> Iterator[tuple[Fetcher, int]]:
    """The fetcher over the model's first file, and memory in huge pages to read into."""
    provider = plugins.load_all(load_registry()).providers["fetch"][fetcher]
    given = Facts(facts, CacheFacts(0, 0, 0), FetchFacts((facts.shards[0].path,), 4, True, batch))
    region = memory.reserve(nbytes, huge=True)
    memory.fill(region.address, 0, nbytes)
    reader = provider.build(provider.options(), given)
    try:
        yield reader, region.address
    finally:
        reader.close()
        region.close()


def bandwidth(facts: ModelFacts, fetcher: str, nbytes: int) -> float:
    """Bytes per second of direct reads of expert slices at random places, a layer's worth at a time."""
    bank = facts.banks[0]
    stride = memory.round_up(max(p.stride for p in bank.projections))
    count = bank.n_used * len(bank.projections)
    length, zeros = np.full(count, stride, dtype=np.int64), np.zeros(count, dtype=np.int64)
    draw = np.random.default_rng()
    with _reading(facts, fetcher, stride * count, count) as (reader, address):
        places = address + np.arange(count, dtype=np.int64) * stride

        def batch(index: int) -> ReadBatch:
            at = draw.integers(0, (facts.shards[0].nbytes - stride) // memory.PAGE, count) * memory.PAGE
            return ReadBatch(places, length, length, at, zeros, zeros)

        return _rate(reader, batch, stride * count, nbytes)


def sequential(facts: ModelFacts, fetcher: str, nbytes: int) -> float:
    """Bytes per second of direct reads in file order, 32 MiB at a time and two of them in flight."""
    size = max(memory.PAGE, min(32 << 20, facts.shards[0].nbytes // 4 // memory.PAGE * memory.PAGE))
    zeros = np.zeros(1, dtype=np.int64)
    length = np.full(1, size, dtype=np.int64)
    room = facts.shards[0].nbytes // size - 1
    first = int(np.random.default_rng().integers(0, max(1, room)))
    with _reading(facts, fetcher, 4 * size, 8) as (reader, address):

        def batch(index: int) -> ReadBatch:
            place = np.array([address + index % 4 * size], dtype=np.int64)
            return ReadBatch(place, length, length, np.array([(first + index) % max(1, room) * size]), zeros, zeros)

        return _rate(reader, batch, size, nbytes, ahead=2)


def _rate(reader: Fetcher, batch: Callable[[int], ReadBatch], size: int, nbytes: int, ahead: int = 0) -> float:
    began, done = time.perf_counter(), 0
    total = max(1, nbytes // size)
    tickets = [reader.submit(batch(index)) for index in range(min(ahead, total))]
    for index in range(total):
        if index + ahead < total:
            tickets.append(reader.submit(batch(index + ahead)))
        done += reader.wait(tickets.pop(0), 0)
    return done / (time.perf_counter() - began)
