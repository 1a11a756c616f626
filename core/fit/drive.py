"""How fast a drive gives experts at random places: read through the fetcher that a run would use."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bmoe.choices import Choice
from bmoe.contracts import Facts, Fetcher, ModelFacts, ReadBatch, ShardFacts
from bmoe.errors import ModelError, NativeError, ReadError
from bmoe.native import memory
from bmoe.scratch import data_file

_SECONDS = 1.0
_LEAST, _MOST = 3, 40
_SAMPLE = 256 << 20


@dataclass(frozen=True, slots=True)
class Drive:
    """Median seconds to wait for one expert (``first_s``), and for each more at once; experts of ``slice_bytes``.

    ``fetcher`` read them from ``path``; ``direct`` tells whether the page cache was bypassed.
    """

    first_s: float
    next_s: float
    slice_bytes: int
    fetcher: str
    path: str
    direct: bool

    def mean(self, other: Drive) -> Drive:
        """Of two measurements of the same drive."""
        first_s, next_s = (self.first_s + other.first_s) / 2, (self.next_s + other.next_s) / 2
        return replace(self, first_s=first_s, next_s=next_s)


def measure(facts: ModelFacts, choice: Choice, given: Facts, place: Path | None = None) -> Drive:
    """Read experts at random places of the model's own files, or with ``place`` of that file, which is no model.

    Some 1.5 s. Raises ReadError if it cannot be read.
    """
    import numpy as np

    bank = max(facts.banks, key=lambda each: each.entry_bytes)
    holding = sorted({p.shard for each in facts.banks for p in each.projections})
    paths = [facts.shards[number].path for number in holding] if place is None else [str(place)]
    shards = tuple(ShardFacts(path, os.stat(path).st_size) for path in paths)
    slices = [memory.round_up(p.stride) for p in bank.projections]
    used = max(1, min(bank.n_used, bank.n_expert))
    fetch = given.fetch
    fetch = type(fetch)(tuple(paths), fetch.lanes, fetch.direct, max(fetch.batch, used * len(slices)))
    draw = np.random.default_rng()
    region = memory.reserve(used * sum(slices), huge=True)
    times: dict[int, list[float]] = {1: [], used: []}
    try:
        memory.fill(region.address, 0, region.nbytes)
        fetcher: Fetcher = choice.provider.build(choice.options, type(given)(given.model, given.cache, fetch))
        try:
            until = time.perf_counter() + _SECONDS
            while len(times[used]) < _LEAST or (time.perf_counter() < until and len(times[used]) < _MOST):
                for count, took in times.items():
                    batch = _batch(region.address, slices * count, shards, draw)
                    ticket = fetcher.submit(batch)
                    began = time.perf_counter()  # what submitting takes counts as making room (core/fit/overhead.py)
                    fetcher.wait(ticket, 0)
                    took.append(time.perf_counter() - began)
            direct = bool(fetcher.direct)
        finally:
            fetcher.close()
    finally:
        region.close()
    first, whole = statistics.median(times[1]), statistics.median(times[used])
    further = max(0.0, whole - first) / (used - 1) if used > 1 else first
    further = further or first / used
    return Drive(max(first, further), further, bank.entry_bytes, choice.name, paths[0], direct)


def _batch(address: int, lengths: Sequence[int], shards: Sequence[ShardFacts], draw: object) -> ReadBatch:
    import numpy as np

    rng = draw if isinstance(draw, np.random.Generator) else np.random.default_rng()
    length = np.array(lengths, dtype=np.int64)
    places = address + np.concatenate(([0], np.cumsum(length)[:-1])).astype(np.int64)
    weights = np.array([shard.nbytes for shard in shards], dtype=np.float64)
    shard = rng.choice(len(shards), len(length), p=weights / weights.sum()).astype(np.int64)
    room = np.array([max(1, (shards[s].nbytes - n) // memory.PAGE) for s, n in zip(shard, length, strict=True)])
    if any(shards[s].nbytes < n for s, n in zip(shard, length, strict=True)):
        raise ReadError(f"{shards[0].path}: is smaller than one expert; name a larger file or a folder with --drive")
    offset = rng.integers(0, room) * memory.PAGE
    return ReadBatch(places, length, length, offset, shard, np.zeros(len(length), dtype=np.int64))


@contextlib.contextmanager
def sample(place: str) -> Iterator[Path]:
    """A file to measure with: ``place`` itself, or in a folder a temporary one of 256 MiB that leaves no trace.

    Raises ModelError if there is neither, or no room.
    """
    path = Path(place)
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise ModelError(
            f"{place}: is neither a file nor a folder; give --drive one on the drive that the model will be on"
        )
    with contextlib.ExitStack() as made:
        try:
            file, _ = made.enter_context(data_file(place, _SAMPLE))
        except NativeError as error:
            raise ModelError(f"{error}; name another place with --drive") from error
        yield Path(file)
