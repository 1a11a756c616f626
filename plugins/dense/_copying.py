"""Dense weights read from the files into memory of one's own: where they go, and the reads that bring them.

A tensor keeps the place inside its page that it has in the file. So whole pages are read straight into place, and what
lies beside a tensor there are the file's own bytes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bmoe.contracts import DenseTensor, Facts, ModelFacts, Placement
from bmoe.errors import ReadError
from bmoe.native import io, memory, residency

CHUNK = 8 << 20
"""Bytes per read: large enough for a device's whole bandwidth, small enough to be interrupted."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tensors of one file: ``nbytes``, whole pages from ``offset`` on; ``end`` is their last byte's."""

    shard: int
    offset: int
    end: int
    tensors: tuple[DenseTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the run takes in memory."""
        return memory.round_up(self.end) - self.offset

    @property
    def address(self) -> int:
        """The page in which the run begins where llama.cpp has mapped it."""
        return self.tensors[0].address - (self.tensors[0].offset - self.offset)

    def places(self, address: int) -> Mapping[str, int]:
        """Where its tensors are once the run is at the page-aligned ``address``."""
        return {tensor.name: address + tensor.offset - self.offset for tensor in self.tensors}


def make_runs(tensors: Iterable[DenseTensor], most: int | None = None) -> list[Run]:
    """Runs in the order of the files; a gap of a page ends one, and so does ``most`` bytes. Empty tensors are left."""
    runs: list[Run] = []
    for tensor in sorted(tensors, key=lambda t: (t.shard, t.offset)):
        end, last = tensor.offset + tensor.nbytes, runs[-1] if runs else None
        if (
            last is not None
            and last.shard == tensor.shard
            and memory.round_down(tensor.offset) <= last.offset + last.nbytes
        ):
            joined = Run(last.shard, last.offset, max(end, last.end), (*last.tensors, tensor))
            if most is None or joined.nbytes <= most:
                runs[-1] = joined
                continue
        if tensor.nbytes:
            runs.append(Run(tensor.shard, memory.round_down(tensor.offset), end, (tensor,)))
    return runs


class Copier:
    """Reads runs, one thread, direct if the profile asks for direct reads and the file allows them."""

    def __init__(self, facts: Facts) -> None:
        """Nothing is opened before the first read."""
        self._paths = tuple(shard.path for shard in facts.model.shards)  # copies serve experts alone
        self._direct = facts.fetch.direct
        self._files: dict[int, io.DataFile] = {}
        self.notices: list[str] = []

    def read(self, run: Run, address: int) -> None:
        """Bring ``run`` to the page-aligned ``address``; ReadError or ModelError names the file."""
        for start in range(run.offset, run.offset + run.nbytes, CHUNK):
            length = min(CHUNK, run.offset + run.nbytes - start)
            self._read(run.shard, address + start - run.offset, length, start, min(length, run.end - start))

    def _read(self, shard: int, address: int, length: int, offset: int, required: int) -> None:
        file = self._file(shard)
        got = 0
        while got < required:
            count = io.pread(file.fd, address + got, length - got, offset + got)
            if count in (-errno.EINTR, -errno.EAGAIN):
                continue
            if count < 0 and file.direct and self._buffered(shard, f"a direct read into this memory failed ({-count})"):
                file = self._files[shard]
                continue
            if count <= 0:
                raise ReadError(io.describe(file, offset, length, count if count < 0 else got, required))
            got += count

    def _file(self, shard: int) -> io.DataFile:
        if shard not in self._files:
            self._files[shard] = file = io.open_data(self._paths[shard], direct=self._direct)
            if file.note:
                self.notices.append(f"dense weights are read through the page cache: {file.note}")
        return self._files[shard]

    def _buffered(self, shard: int, why: str) -> bool:
        """Go on through the page cache, if that is what this reader is for; see :class:`ForgivingCopier`."""
        return False

    def close(self) -> None:
        """Close the files. May be called twice."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class ForgivingCopier(Copier):
    """For memory that a device may refuse to write to: there, reads go through the page cache instead."""

    def _buffered(self, shard: int, why: str) -> bool:
        self._files.pop(shard).close()
        self._files[shard] = io.open_data(self._paths[shard], direct=False)
        self.notices.append(f"dense weights are read through the page cache: {why}")
        return True


def size_of_copy(model: ModelFacts) -> int:
    """Bytes that copies of all dense weights of a model take, in whole pages."""
    return sum(
        run.nbytes for run in make_runs(DenseTensor(t.name, 0, t.nbytes, t.shard, t.offset) for t in model.dense)
    )


def bytes_of(tensors: Sequence[DenseTensor]) -> int:
    """Bytes that a copy of these tensors takes, in whole pages."""
    return sum(run.nbytes for run in make_runs(tensors))


def copy_into(
    region: memory.Region,
    tensors: Sequence[DenseTensor],
    facts: Facts,
    prepare: Callable[[int, int], None] = lambda address, nbytes: None,
) -> Placement:
    """Read all tensors into a region of :func:`bytes_of` them, each part after ``prepare(address, nbytes)``.

    ReadError names the read that failed.
    """
    at, moved, copier = region.address, dict[str, int](), Copier(facts)
    try:
        for run in make_runs(tensors):
            prepare(at, run.nbytes)
            copier.read(run, at)
            moved.update(run.places(at))
            at += run.nbytes
    finally:
        copier.close()
    placed = at - region.address
    resident = residency.resident_bytes(region.address, placed) if placed else 0
    return Placement(placed, resident, moved, tuple(copier.notices))
