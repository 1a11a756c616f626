"""Where every expert lies, in memory and in the files: page spans, so that direct reads go straight into place.

A region is reserved per projection, with the tensor's data at the same offset inside its page as in the file. Then the
page-rounded superset of a slice can be read to where it belongs: the margins are the neighbours' own bytes. Pages that
lie wholly inside a slice are its *interior*; pages shared with a neighbour are its *edges*.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from bmoe.contracts import BankFacts, ReadBatch
from bmoe.native import memory


def region_bytes(bank: BankFacts, projection: int) -> int:
    """Bytes to reserve for one projection of a bank, page margins included."""
    facts = bank.projections[projection]
    first = memory.round_down(facts.offset)
    return memory.round_up(facts.offset + facts.stride * bank.n_expert) - first


class BankPages:
    """Geometry of one bank over the page-aligned addresses of its regions, one per projection.

    ``data``: where each projection's tensor data must point. ``interior[expert]``: (address, bytes) per projection,
    possibly empty. ``edges[expert]``: addresses of pages shared with neighbours. ``pages``: the most pages that one
    entry holds.
    """

    def __init__(self, bank: BankFacts, regions: Sequence[int]) -> None:
        page = memory.PAGE
        experts = np.arange(bank.n_expert, dtype=np.int64)
        columns: list[list[np.ndarray]] = [[], [], [], [], [], []]
        inner: list[list[tuple[int, int]]] = []
        edges: list[list[int]] = [[] for _ in range(bank.n_expert)]
        self.data: list[int] = []
        for stage, (facts, region) in enumerate(zip(bank.projections, regions, strict=True)):
            home = region - memory.round_down(facts.offset)  # memory address of file offset 0
            self.data.append(home + facts.offset)
            first = facts.offset + experts * facts.stride
            last = first + facts.stride
            outer_first, outer_last = first & -page, (last + page - 1) & -page
            inner_first, inner_last = (first + page - 1) & -page, last & -page
            inner_bytes = np.maximum(inner_last - inner_first, 0)
            for column, values in zip(
                columns,
                (home + outer_first, outer_last - outer_first, last - outer_first, outer_first),
                strict=False,
            ):
                column.append(values)
            columns[4].append(np.full_like(experts, facts.shard))
            columns[5].append(np.full_like(experts, stage))
            inner.append(list(zip((home + inner_first).tolist(), inner_bytes.tolist(), strict=True)))
            for expert in range(bank.n_expert):
                begin, end = int(outer_first[expert]), int(outer_last[expert])
                shared = set(range(begin, end, page)) if not inner_bytes[expert] else {begin, end - page}
                inside = range(int(inner_first[expert]), int(inner_last[expert]))
                edges[expert].extend(home + at for at in sorted(shared) if at not in inside)
        self._columns = np.stack([np.stack(column) for column in columns])  # [column of ReadBatch, projection, expert]
        self.interior = list(zip(*inner, strict=True))
        self.edges = [tuple(pages) for pages in edges]
        self.interior_pages = [sum(size for _, size in spans) // page for spans in self.interior]
        self.pages = max(count + len(shared) for count, shared in zip(self.interior_pages, self.edges, strict=True))

    def reads(self, experts: Sequence[int]) -> ReadBatch:
        """The reads that bring these experts in, first projection first, in the order of the file.

        Those whose pages meet are one read: no page is the target of two reads at a time, for a drive that decrypts in
        place would decrypt it twice.
        """
        columns = self._columns.take(sorted(experts), axis=2)
        if len(experts) == 1:
            return ReadBatch(*columns.reshape(len(columns), -1))
        offset, length = columns[3], columns[1]
        opens = np.ones(offset.shape, dtype=bool)
        opens[:, 1:] = offset[:, 1:] > offset[:, :-1] + length[:, :-1]
        first = np.flatnonzero(opens)
        last = np.append(first[1:], opens.size) - 1
        flat = columns.reshape(len(columns), -1)
        address, _, _, begin, shard, stage = flat[:, first]
        before = flat[3, last] - begin  # bytes from where the first expert's pages begin to where the last one's do
        return ReadBatch(address, before + flat[1, last], before + flat[2, last], begin, shard, stage)

    def meets(self, expert: int, others: Collection[int]) -> bool:
        """Whether ``expert`` has a page in common with one of ``others``."""
        pages = set(self.edges[expert])
        return any(other != expert and not pages.isdisjoint(self.edges[other]) for other in others)


def by_stage(batch: ReadBatch) -> list[ReadBatch]:
    """A batch that is ordered by stage, cut into one per stage."""
    cuts = np.flatnonzero(np.diff(batch.stage)) + 1
    columns = (batch.address, batch.length, batch.required, batch.offset, batch.shard, batch.stage)
    return [ReadBatch(*parts) for parts in zip(*(np.split(column, cuts) for column in columns), strict=True)]
