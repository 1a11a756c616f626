"""Every byte of an expert has one place, in memory and in the file, and every page is interior or edge, once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.contracts import BankFacts, ProjectionFacts
from bmoe.native import memory
from bmoe.native.memory import PAGE
from bmoe.pages import BankPages, region_bytes


def bank_of(n_expert: int, slices: list[tuple[int, int]]) -> BankFacts:
    """A bank from (file offset, stride) per projection."""
    projections = tuple(
        ProjectionFacts(f"blk.0.p{i}.weight", f"p{i}", i % 2, offset, stride, "F32")
        for i, (offset, stride) in enumerate(slices)
    )
    return BankFacts(0, 0, n_expert, 1, projections)


OFFSETS = st.integers(0, 5 * PAGE).map(lambda n: n * 32)
STRIDES = st.one_of(
    st.integers(1, 40).map(lambda n: n * 18),
    st.integers(1, 4 * PAGE),
    st.integers(1, 5).map(lambda n: n * PAGE),
    st.integers(-2, 2).map(lambda n: 3 * PAGE + n),
)
BANKS = st.builds(bank_of, st.integers(1, 9), st.lists(st.tuples(OFFSETS, STRIDES), min_size=1, max_size=3))


def layout(bank: BankFacts) -> tuple[BankPages, list[int]]:
    """Pages over made-up regions that do not overlap; nothing is mapped."""
    regions, at = [], 1 << 32
    for index in range(len(bank.projections)):
        regions.append(at)
        at += region_bytes(bank, index) + 7 * PAGE
    return BankPages(bank, regions), regions


@given(BANKS)
def test_data_lies_in_its_region_at_the_offset_inside_its_page_that_it_has_in_the_file(bank: BankFacts) -> None:
    pages, regions = layout(bank)
    for index, facts in enumerate(bank.projections):
        first, end = pages.data[index], pages.data[index] + facts.stride * bank.n_expert

        assert facts.offset % PAGE == first % PAGE
        assert regions[index] <= first
        assert end <= regions[index] + region_bytes(bank, index)
        assert regions[index] % PAGE == region_bytes(bank, index) % PAGE == 0


@given(BANKS)
def test_interior_and_edges_are_exactly_the_pages_of_the_slices(bank: BankFacts) -> None:
    pages, _ = layout(bank)
    for expert in range(bank.n_expert):
        touched: set[int] = set()
        own: set[int] = set()
        for index, facts in enumerate(bank.projections):
            first = pages.data[index] + expert * facts.stride
            last = first + facts.stride
            for page in range(first // PAGE * PAGE, last, PAGE):
                touched.add(page)
                if first <= page and page + PAGE <= last:
                    own.add(page)
        interior = [page for start, size in pages.interior[expert] for page in range(start, start + size, PAGE)]

        assert sorted(own) == interior
        assert sorted(touched - own) == sorted(pages.edges[expert])
        assert len(own) == pages.interior_pages[expert]
        assert len(touched) <= pages.pages


@given(BANKS, st.data())
def test_reads_are_the_pages_of_the_slices_each_once_and_in_order(bank: BankFacts, data: st.DataObject) -> None:
    """Those of experts whose pages meet are one read: no page is the target of two."""
    pages, _ = layout(bank)
    experts = data.draw(st.lists(st.integers(0, bank.n_expert - 1), min_size=1, unique=True))
    reads = pages.reads(experts)
    rows = [reads.row(index) for index in range(len(reads))]

    assert [(row.stage, row.offset) for row in rows] == sorted((row.stage, row.offset) for row in rows)
    for stage, facts in enumerate(bank.projections):
        mine = [row for row in rows if row.stage == stage]
        wanted: set[int] = set()
        for expert in experts:
            first = facts.offset + expert * facts.stride
            wanted.update(range(first // PAGE, (first + facts.stride - 1) // PAGE + 1))
        found = [page for row in mine for page in range(row.offset // PAGE, (row.offset + row.length) // PAGE)]
        assert sorted(wanted) == found
        ends = {facts.offset + (expert + 1) * facts.stride for expert in experts}
        for row in mine:
            assert 0 == row.address % PAGE == row.length % PAGE == row.offset % PAGE
            assert facts.shard == row.shard
            assert row.address - pages.data[stage] == row.offset - facts.offset
            assert row.offset + row.required in ends
            assert 0 <= row.length - row.required < PAGE


@pytest.fixture(name="data", scope="module")
def _data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, bytes]]:
    content = np.random.default_rng(3).integers(0, 256, 41 * PAGE + 777, dtype=np.uint8).tobytes()
    path: Path = tmp_path_factory.mktemp("pages") / "data.bin"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    yield fd, content
    os.close(fd)


@given(
    n_expert=st.integers(1, 6),
    offset=st.integers(0, 300).map(lambda n: n * 32),
    stride=st.integers(1, 6 * PAGE),
    order=st.randoms(use_true_random=False),
)
def test_what_the_reads_say_brings_every_expert_to_its_place(
    data: tuple[int, bytes], n_expert: int, offset: int, stride: int, order: object
) -> None:
    fd, content = data
    bank = bank_of(n_expert, [(offset, stride)])
    region = memory.reserve(region_bytes(bank, 0))
    try:
        pages = BankPages(bank, [region.address])
        experts = list(range(n_expert))
        order.shuffle(experts)  # type: ignore[attr-defined]
        reads = pages.reads(experts)
        for index in range(len(reads)):
            row = reads.row(index)
            assert os.preadv(fd, [memory.view(row.address, row.length)], row.offset) >= row.required
        for expert in range(n_expert):
            start = pages.data[0] + expert * stride
            expected = content[offset + expert * stride : offset + (expert + 1) * stride]
            assert expected == bytes(memory.view(start, stride))
    finally:
        region.close()
