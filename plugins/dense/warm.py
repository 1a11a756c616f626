"""Dense placement ``warm``: weights outside the experts are read into the page cache before the first token.

They stay where llama.cpp mapped them, and the kernel may give them up again; only the first use of each is faster.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import DensePlacement, DenseTensor, Facts, Options, Placement
from bmoe.errors import ReadError
from bmoe.native import io, memory, residency
from bmoe_plugins.dense._copying import CHUNK, make_runs


class Warm:
    """Moves nothing and owns nothing; reads once."""

    def __init__(self, facts: Facts) -> None:
        self._paths = tuple(shard.path for shard in facts.model.shards)  # what is mapped

    def place(self, tensors: Sequence[DenseTensor], /) -> Placement:
        """Read every tensor's pages; ReadError if the drive fails, since the first token would meet that as a crash."""
        runs, spare = make_runs(tensors), memory.reserve(CHUNK)
        try:
            files: dict[int, io.DataFile] = {}
            try:
                for run in runs:
                    if run.shard not in files:
                        files[run.shard] = file = io.open_data(self._paths[run.shard], direct=False)
                        _read_exactly(file.fd)
                    self._warm(files[run.shard], run.offset, run.end, spare.address)
            finally:
                for file in files.values():
                    file.close()
        finally:
            spare.close()
        found = [residency.resident_bytes(run.address, run.nbytes) for run in runs]
        resident = None if None in found else sum(part or 0 for part in found)
        return Placement(placed_bytes=0, resident_bytes=resident)

    def _warm(self, file: io.DataFile, first: int, end: int, spare: int) -> None:
        at = first
        while at < end:
            count = io.pread(file.fd, spare, min(CHUNK, end - at), at)
            if count <= 0:
                raise ReadError(io.describe(file, first, end - first, count if count < 0 else at - first, end - first))
            at += count

    def close(self) -> None:
        """Nothing to release."""


def _read_exactly(fd: int) -> None:
    """No reading ahead: behind the dense weights come experts, which nobody wants in the page cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def _build(options: Options, facts: Facts) -> Warm:
    return Warm(facts)


@hookimpl
def bmoe_dense() -> Sequence[Provider[DensePlacement]]:
    """Page cache, filled in advance."""
    return [Provider("warm", _build, summary="read dense weights into the page cache before the first token")]
