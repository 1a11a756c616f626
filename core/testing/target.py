"""What the gates of fetchers read: files of random bytes, and memory that tells whether the right ones arrived."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bmoe.contracts import Read, ReadBatch
from bmoe.native import memory

PAGE = memory.PAGE
SIZES = (64 * PAGE, 37 * PAGE + 123, 5 * PAGE - 1)
"""Bytes of the shards: whole pages, a little more, a little less."""


class Shards:
    """Files of random bytes in a folder; ``content[i]`` is what file ``paths[i]`` holds."""

    def __init__(self, folder: Path, sizes: Sequence[int] = SIZES) -> None:
        draw = random.Random(7)
        self.content = [draw.randbytes(size) for size in sizes]
        self.paths = tuple(str(folder / f"shard-{index}") for index in range(len(sizes)))
        for index in range(len(sizes)):
            self.restore(index)

    def restore(self, index: int) -> None:
        """Write a file's bytes, to storage too, so that its pages may leave the page cache."""
        fd = os.open(self.paths[index], os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(self.content[index])
            file.flush()
            os.fsync(fd)


class Target:
    """Memory for one batch: each read has its place, with a page between places that must never change."""

    def __init__(self, rows: Sequence[tuple[int, int, int, int]], content: Sequence[bytes]) -> None:
        """``rows`` are (shard, first page, pages, stage)."""
        self._content = content
        rows = sorted(rows, key=lambda row: row[3])
        self.region = memory.reserve(sum((pages + 1) * PAGE for _, _, pages, _ in rows) + PAGE)
        memory.fill(self.region.address, 0xAA, self.region.nbytes)
        self.rows: list[Read] = []
        at = self.region.address + PAGE
        for shard, page, pages, stage in rows:
            required = min(pages * PAGE, len(content[shard]) - page * PAGE)
            self.rows.append(Read(at, pages * PAGE, required, page * PAGE, shard, stage))
            at += (pages + 1) * PAGE
        self.batch = ReadBatch(*np.array(self.rows, dtype=np.int64).reshape(-1, 6).T.copy())

    def wrong(self, upto: int) -> list[Read]:
        """The reads of stages up to ``upto`` whose bytes are not the file's."""
        return [
            row
            for row in self.rows
            if row.stage <= upto
            and bytes(memory.view(row.address, row.required))
            != self._content[row.shard][row.offset : row.offset + row.required]
        ]

    def touched_between(self) -> bool:
        """Whether anything was written beside the places of the reads."""
        gaps = [self.region.address, *(row.address + row.length for row in self.rows)]
        return any(bytes(memory.view(gap, PAGE)) != b"\xaa" * PAGE for gap in gaps)

    def required(self, upto: int) -> int:
        """Bytes of the stages up to ``upto``."""
        return sum(row.required for row in self.rows if row.stage <= upto)
