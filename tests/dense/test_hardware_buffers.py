"""Weights in Android hardware buffers, with a stand-in for the system's library: sizes, limits, refusals, releases."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

import pytest

from bmoe.contracts import CacheFacts, DenseTensor, Facts, FetchFacts
from bmoe.errors import NativeError
from bmoe.native import hardware_buffer, memory
from bmoe.resolve import resolve
from bmoe.testing.faults import Faults
from bmoe.testing.models import TinyModels
from bmoe_plugins.dense.ahwb import HardwareBuffers

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the stand-in")

SOURCE = """
#include <stdint.h>
#include <stdlib.h>
struct description { uint32_t width, height, layers, format; uint64_t usage; uint32_t stride, rfu0; uint64_t rfu1; };
struct buffer { uint64_t usage; int locked; void * memory; };
int live, locked, most_width, refuse_allocate, refuse_lock, crooked;
int AHardwareBuffer_allocate(const struct description * d, struct buffer ** out) {
    if (refuse_allocate) return -12;
    if (d->height != 1 || d->layers != 1 || d->format != 0x21 || d->usage != 0x33 || d->width > 0x7fffffffu) return -22;
    struct buffer * b = calloc(1, sizeof *b);
    b->usage = d->usage;
    if (posix_memalign(&b->memory, 1 << 16, d->width + 64)) return -12;
    if ((int) d->width > most_width) most_width = d->width;
    live++;
    *out = b;
    return 0;
}
int AHardwareBuffer_lock(struct buffer * b, uint64_t usage, int32_t fence, const void * rect, void ** out) {
    if (refuse_lock || b->locked || fence != -1 || rect || (usage & ~b->usage)) return -22;
    b->locked = 1;
    locked++;
    *out = (char *) b->memory + crooked;
    return 0;
}
int AHardwareBuffer_unlock(struct buffer * b, int32_t * fence) {
    if (!b->locked) abort();
    b->locked = 0;
    locked--;
    return 0;
}
void AHardwareBuffer_release(struct buffer * b) {
    if (b->locked) abort();
    free(b->memory);
    free(b);
    live--;
}
"""


class StandIn:
    def __init__(self, path: Path) -> None:
        self.path, self._library = str(path), CDLL(str(path))

    def __getitem__(self, name: str) -> int:
        return self._field(name).value

    def __setitem__(self, name: str, value: int) -> None:
        self._field(name).value = value

    def _field(self, name: str):
        from ctypes import c_int

        return c_int.in_dll(self._library, name)


@pytest.fixture(name="android")
def android_(tmp_path: Path) -> Iterator[StandIn]:
    source, library = tmp_path / "android.c", tmp_path / "libandroid.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    android = StandIn(library)
    yield android
    assert (android["live"], android["locked"]) == (0, 0), "a buffer was left"


@pytest.fixture(name="world", scope="module")
def world_(tmp_path_factory: pytest.TempPathFactory) -> tuple[Facts, list[DenseTensor], bytes]:
    path = TinyModels(tmp_path_factory.mktemp("models")).path()
    model = resolve({"model": {"path": str(path)}, "cache": {"budget_mb": 0}}).facts
    content = path.read_bytes()
    tensors = [DenseTensor(t.name, 0, t.nbytes, t.shard, t.offset) for t in model.dense]
    return Facts(model, CacheFacts(0, 0, 8), FetchFacts((str(path),), 1, True, 8)), tensors, content


def check(moved, tensors: list[DenseTensor], content: bytes) -> None:
    for tensor in tensors:
        held = bytes(memory.view(moved[tensor.name], tensor.nbytes))
        assert held == content[tensor.offset :][: tensor.nbytes], tensor.name
        assert moved[tensor.name] % memory.PAGE == tensor.offset % memory.PAGE


def test_every_weight_is_held_and_everything_is_released(android: StandIn, world):
    facts, tensors, content = world
    placement = HardwareBuffers(facts, android.path)

    placed = placement.place(tensors)

    check(placed.moved, tensors, content)
    assert (android["live"], android["locked"]) == (1, 1)
    assert placed.placed_bytes == android["most_width"] >= sum(t.nbytes for t in tensors)
    placement.close()
    placement.close()


def test_no_buffer_exceeds_the_limit_and_a_larger_weight_stays_mapped(android: StandIn, world):
    facts, tensors, content = world
    sizes = sorted({t.nbytes for t in tensors})
    most = memory.round_up(sizes[-2]) + 2 * memory.PAGE  # only the largest do not fit
    large = {t.name for t in tensors if t.nbytes == sizes[-1]}
    placement = HardwareBuffers(facts, android.path, most)

    placed = placement.place(tensors)

    assert android["most_width"] <= most
    assert android["live"] > 1
    assert large.isdisjoint(placed.moved)
    check(placed.moved, [t for t in tensors if t.name not in large], content)
    told = [line for line in placed.notices if "stays mapped" in line]
    assert {line.split()[0] for line in told} == large
    placement.close()


def test_a_direct_read_that_is_refused_goes_through_the_page_cache_and_says_so(android: StandIn, world, monkeypatch):
    facts, tensors, content = world
    faults = Faults(monkeypatch)
    placement = HardwareBuffers(facts, android.path)

    with faults.once(3, -errno.EFAULT):  # the first two reads are those that try whether direct reads work
        placed = placement.place(tensors)

    if not faults.met:
        pytest.skip("this file system has no direct reads")
    check(placed.moved, tensors, content)
    assert [line for line in placed.notices if "page cache" in line]
    placement.close()


@pytest.mark.parametrize(
    ("refusal", "told"),
    [("refuse_allocate", "was refused"), ("refuse_lock", "cannot be locked"), ("crooked", "which is no page's")],
)
def test_a_refusal_is_one_line_and_leaves_nothing(android: StandIn, world, refusal: str, told: str):
    facts, tensors, _ = world
    android[refusal] = 32
    placement = HardwareBuffers(facts, android.path)

    with pytest.raises(NativeError, match=told) as caught:
        placement.place(tensors)

    assert "\n" not in str(caught.value)
    placement.close()


def test_elsewhere_it_says_that_it_is_androids():
    assert "Android" in hardware_buffer.missing("libandroid-is-not-here.so")


def test_a_profile_that_asks_for_it_elsewhere_is_refused(tmp_path: Path):
    import bmoe

    if not hardware_buffer.missing():
        pytest.skip("this is Android")
    path = TinyModels(tmp_path).path()
    with pytest.raises(bmoe.BmoeError, match='dense.placement = "ahwb" cannot run here: hardware buffers are Android'):
        bmoe.open({"dense": {"placement": "ahwb"}, "plugins": {"allow_experimental": True}}, str(path))
