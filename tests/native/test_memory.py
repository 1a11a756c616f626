"""Reserved memory: nothing is committed before it is written, and what is released or moved is really gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bmoe.native import memory
from bmoe.native.memory import PAGE

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page tables are only readable on Linux")


def present(address: int, nbytes: int) -> list[int]:
    """Which pages of a range are in memory, by number."""
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(address // PAGE * 8)
        entries = memoryview(file.read(nbytes // PAGE * 8)).cast("Q")
    return [number for number, entry in enumerate(entries) if entry >> 63]


def test_reserved_pages_exist_only_once_written() -> None:
    region = memory.reserve(64 * PAGE - 5)
    try:
        before = present(region.address, region.nbytes)
        memory.fill(region.address + 3 * PAGE, 7, 2 * PAGE)

        assert (64 * PAGE, []) == (region.nbytes, before)
        assert [3, 4] == present(region.address, region.nbytes)
    finally:
        region.close()


def test_released_pages_are_gone_and_read_as_zeros() -> None:
    region = memory.reserve(8 * PAGE)
    try:
        memory.fill(region.address, 7, 8 * PAGE)
        memory.release(region.address + 2 * PAGE, 3 * PAGE)

        assert [0, 1, 5, 6, 7] == present(region.address, region.nbytes)
        assert bytes(3 * PAGE) == bytes(memory.view(region.address + 2 * PAGE, 3 * PAGE))
    finally:
        region.close()


def test_recycled_pages_take_their_content_along_and_leave_nothing_behind() -> None:
    region = memory.reserve(32 * PAGE)
    try:
        for page in range(4):
            memory.fill(region.address + page * PAGE, page + 1, PAGE)

        assert memory.recycle(region.address, region.address + 20 * PAGE, 4 * PAGE)

        assert [20, 21, 22, 23] == present(region.address, region.nbytes)
        moved = memory.view(region.address + 20 * PAGE, 4 * PAGE)
        assert [1, 2, 3, 4] == [moved[page * PAGE] for page in range(4)]
        memory.fill(region.address, 9, 4 * PAGE)  # the source can be used again
    finally:
        region.close()


def test_a_refused_move_leaves_a_target_that_can_be_read_into() -> None:
    region = memory.reserve(16 * PAGE)
    gone = memory.reserve(4 * PAGE)
    source = gone.address
    gone.close()
    try:
        assert not memory.recycle(source, region.address + 4 * PAGE, 4 * PAGE)

        memory.fill(region.address, 5, 16 * PAGE)
        assert 16 == len(present(region.address, region.nbytes))
    finally:
        region.close()


@pytest.mark.parametrize("pages", [2, 6])
def test_pages_put_together_from_two_moves_can_be_given_on_or_are_refused(pages: int) -> None:
    region = memory.reserve(64 * PAGE)
    try:
        memory.fill(region.address, 1, 64 * PAGE)
        assert memory.recycle(region.address + 40 * PAGE, region.address + 8 * PAGE, 4 * PAGE)
        memory.fill(region.address + 12 * PAGE, 2, 2 * PAGE)

        moved = memory.recycle(region.address + 8 * PAGE, region.address + 20 * PAGE, pages * PAGE)

        target = memory.view(region.address + 20 * PAGE, pages * PAGE)
        expected = [1, 1, 1, 1, 2, 2][:pages] if moved else [0] * pages
        assert expected == [target[page * PAGE] for page in range(pages)]
        memory.fill(region.address, 3, 64 * PAGE)
    finally:
        region.close()


def test_a_closed_region_may_be_closed_again_and_keeps_no_mapping() -> None:
    before = memory.count_mappings()
    regions = [memory.reserve(16 * PAGE) for _ in range(50)]
    for region in regions:
        region.close()
        region.close()

    assert abs(memory.count_mappings() - before) <= 2


def test_the_address_space_limit_is_an_error_not_a_crash() -> None:
    program = (
        "import resource\nfrom bmoe.native import memory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "try:\n    memory.reserve(64 << 30)\nexcept memory.NativeError as error:\n    print(error)\n"
        "memory.reserve(1 << 20).close()\nprint('alive')\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    first, second = done.stdout.splitlines()
    assert first.startswith("cannot reserve 65536 MiB of address space: Cannot allocate memory; raise the limit")
    assert "alive" == second


def test_a_mapped_file_is_found_by_its_own_number(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * 64)
    region = memory.reserve(4 * PAGE)
    try:
        with open(path, "rb") as file:
            memory.map_file(region.address + PAGE, 2 * PAGE, file.fileno(), PAGE)
            inode = path.stat().st_ino

            assert {region.address} == memory.file_mappings(inode, str(path))
        assert path.read_bytes()[PAGE : 3 * PAGE] == bytes(memory.view(region.address + PAGE, 2 * PAGE))
        memory.forbid(region.address + PAGE, 2 * PAGE)
        assert set() == memory.file_mappings(inode, str(path))
    finally:
        region.close()
