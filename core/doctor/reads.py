"""Probes that read: in a process of their own, on a model file or on one that is made in a folder and is gone after."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bmoe.contracts import CacheFacts, Facts, Fetcher, FetchFacts, ModelFacts, ReadBatch, ShardFacts
from bmoe.doctor.apart import tell
from bmoe.errors import NativeError
from bmoe.native import io, memory
from bmoe.scratch import data_file

_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
_LANES = (1, 2, 4, 8)


def probe_direct(path: str, nbytes: int) -> dict[str, Any]:
    """``direct``, and ``note`` if not: of a model file, or of one of ``nbytes`` that is made."""
    with _data(path, nbytes) as (file, made):
        opened = io.open_data(file, direct=True)
        try:
            return {
                "direct": opened.direct,
                "note": opened.note,
                "tried": "a new file" if made else "places of the file",
            }
        finally:
            opened.close()


def probe_bandwidth(path: str, names: Sequence[str], quick: bool) -> None:
    """Tell each combination of fetcher, lanes and size of reads as it is measured; then what could not be."""
    from bmoe.plugins import load_all
    from bmoe.registry import load_registry

    providers = load_all(load_registry()).providers["fetch"]
    seconds, budget = (0.08, 4.0) if quick else (0.12, 16.0)
    with _data(path, (64 if quick else 256) << 20) as (file, _):
        nbytes = os.stat(file).st_size
        sizes = [each for each in (_SIZES[1:3] if quick else _SIZES) if each * 4 <= nbytes]
        if not sizes:
            raise NativeError(f"small: {nbytes} bytes are too few to measure")
        lanes = _LANES[::3] if quick else _LANES
        tell({"cells": len(sizes) * len(lanes) * len(names)})
        region = memory.reserve(2 * max(lanes) * max(sizes), huge=True)
        memory.fill(region.address, 0, region.nbytes)
        until = time.monotonic() + budget
        broken: set[str] = set()
        # the fetchers in turn within every combination, so that all of them see the same load
        for each in sizes:
            for count in lanes:
                for name in names:
                    if name in broken or time.monotonic() > until:
                        continue
                    try:
                        fetcher = _open(providers[name], file, nbytes, count)
                        try:
                            rate = _measure(fetcher, region.address, nbytes, each, count, seconds)
                        finally:
                            fetcher.close()
                    except Exception as error:  # noqa: BLE001 - one that fails is told, and the others go on
                        broken.add(name)
                        tell({"fetcher": name, "error": f"{type(error).__name__}: {error}"})
                        continue
                    found = {"fetcher": name, "lanes": count, "read_bytes": each, "bytes_per_s": round(rate)}
                    tell({**found, "direct": fetcher.direct})
        region.close()


def _open(provider: Any, file: str, nbytes: int, lanes: int) -> Fetcher:
    model = ModelFacts(file, "", "", (ShardFacts(file, nbytes),), 0, 0, 0, 0, 0, 0, 0, (), ())
    facts = Facts(model, CacheFacts(0, 0, 0), FetchFacts((file,), lanes, True, 2 * lanes))
    own = {"depth": lanes} if "depth" in provider.options.model_fields else {}
    fetcher: Fetcher = provider.build(provider.options(**own), facts)
    return fetcher


def _measure(fetcher: Fetcher, address: int, nbytes: int, size: int, lanes: int, seconds: float) -> float:
    """Bytes a second of reads of ``size`` at random places, ``2 * lanes`` in a batch; the first batch opens the way."""
    import numpy as np

    count = 2 * lanes
    draw = random.Random()
    index = np.arange(count, dtype=np.int64)
    length, zeros = np.full(count, size, dtype=np.int64), np.zeros(count, dtype=np.int64)
    room = (nbytes - size) // memory.PAGE

    def batch() -> int:
        offset = np.array([draw.randint(0, room) * memory.PAGE for _ in range(count)], dtype=np.int64)
        return fetcher.wait(fetcher.submit(ReadBatch(address + index * size, length, length, offset, zeros, zeros)), 0)

    batch()
    done, began = 0, time.perf_counter()
    while not done or time.perf_counter() - began < seconds:
        done += batch()
    return done / (time.perf_counter() - began)


@contextlib.contextmanager
def _data(path: str, nbytes: int) -> Iterator[tuple[str, bool]]:
    """As :func:`bmoe.scratch.data_file`; a file that has a name is told, for whoever ends this process removes it."""
    with data_file(path, nbytes) as (file, made):
        if made and os.path.dirname(file) != "/proc/self/fd":
            tell({"temporary": file})
        yield file, made
