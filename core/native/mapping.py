"""What is left of llama.cpp's mapping of a model once weights have moved: given up, page by page, and never read again.

A page goes only if no weight that stayed has a byte in it. What llama.cpp has unmapped itself may be anybody's by now,
so only what the kernel still lists as this model's mapping is touched.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from bmoe.contracts import ModelFacts
from bmoe.native import memory


def vacated(facts: ModelFacts, moved: Collection[str]) -> list[list[tuple[int, int]]]:
    """Per shard, page-aligned file ranges that hold something of ``moved`` and nothing of other dense weights."""
    ranges: list[list[tuple[int, int]]] = []
    for shard in range(len(facts.shards)):
        tensors = [t for t in facts.dense if t.shard == shard]
        goes = _pages([(t.offset, t.offset + t.nbytes) for t in tensors if t.name in moved])
        stays = _pages([(t.offset, t.offset + t.nbytes) for t in tensors if t.name not in moved])
        ranges.append([part for span in goes for part in _without(span, stays)])
    return ranges


def release(facts: ModelFacts, bases: Mapping[int, int], moved: Collection[str]) -> int:
    """Make the mapping of ``moved`` inaccessible and drop its page cache; the bytes that were released.

    ``bases`` says where each shard's first byte is, or would be, mapped.
    """
    released = 0
    for shard, spans in enumerate(vacated(facts, moved)):
        base = bases.get(shard)
        if base is None or not spans:
            continue
        path = os.path.realpath(facts.shards[shard].path)
        mapped = _mapped(base, path)
        fd = os.open(path, os.O_RDONLY)
        try:
            for span in spans:
                for first, last in _common(span, mapped):
                    memory.forbid(base + first, last - first)
                    released += last - first
                # only advice: the cache is shared, and pages that others have mapped stay
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, span[0], span[1] - span[0], os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return released


def _mapped(base: int, path: str) -> list[tuple[int, int]]:
    """File ranges that are still mapped from ``base`` on."""
    inode, found = os.stat(path).st_ino, []
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    for line in text.splitlines():
        span, _, offset, _, number, *name = line.split(None, 5)
        first, last = (int(part, 16) for part in span.split("-"))
        at = int(offset, 16)
        if first - at == base and (int(number) == inode or (name and name[0] == path)):
            found.append((at, at + last - first))
    return sorted(found)


def _pages(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages that spans touch, merged and sorted."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(span for span in spans if span[0] < span[1]):
        low, high = memory.round_down(first), memory.round_up(last)
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def _without(span: tuple[int, int], holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    first, parts = span[0], []
    for low, high in holes:
        if high <= first or low >= span[1]:
            continue
        if first < low:
            parts.append((first, low))
        first = max(first, high)
    return [*parts, (first, span[1])] if first < span[1] else parts


def _common(span: tuple[int, int], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    cut = [(max(span[0], low), min(span[1], high)) for low, high in others]
    return [(first, last) for first, last in cut if first < last]
