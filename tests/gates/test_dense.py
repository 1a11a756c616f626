"""The in-tree dense placements pass their gate, and the gate fails for what it is there to find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bmoe.contracts import DensePlacement, DenseTensor, Placement, Provider
from bmoe.native import memory
from bmoe.synth import SHAPES
from bmoe.testing.archs import Bench, session_bench
from bmoe.testing.dense import DenseGates


class TestMmap(DenseGates):
    plugin, provider = "bmoe", "mmap"


class TestWarm(DenseGates):
    plugin, provider = "bmoe", "warm"


class TestAnon(DenseGates):
    plugin, provider = "bmoe", "anon"


class TestLocked(DenseGates):
    plugin, provider = "bmoe", "locked"


class TestLockedInPlace(DenseGates):
    plugin, provider = "bmoe", "locked"
    options = {"copy_weights": False}


class TestRepack(DenseGates):
    plugin, provider = "bmoe", "repack"
    shape = replace(SHAPES["tiny-qwen3moe"], name="quantised", dense="Q4_0", output="Q4_0")


class TestAhwb(DenseGates):
    plugin, provider = "bmoe", "ahwb"


# ---- the gate can fail


class Copied:
    """Copies every weight into one region, as ``alter`` says: (index, address) -> address."""

    def __init__(self, alter: Callable[[int, int], int] = lambda index, at: at, spoil: bool = False) -> None:
        self.alter, self.spoil = alter, spoil
        self.region: memory.Region | None = None

    def place(self, tensors: Sequence[DenseTensor], /) -> Placement:
        total = sum(memory.round_up(t.nbytes) for t in tensors)
        self.region = memory.reserve(total + memory.PAGE)
        at, moved = self.region.address, {}
        for index, tensor in enumerate(tensors):
            moved[tensor.name] = place = self.alter(index, at)
            memory.view(place, tensor.nbytes)[:] = memory.view(tensor.address, tensor.nbytes)
            at += memory.round_up(tensor.nbytes)
        if self.spoil:
            memory.fill(moved[tensors[3].name], 0, 64)
        return Placement(total, None, moved)

    def close(self) -> None:
        if self.region is not None:
            self.region.close()


def gate(build: Callable[[], DensePlacement]) -> DenseGates:
    class Faulty(DenseGates):
        plugin, provider = "bmoe", "mmap"

        def load(self) -> Provider[DensePlacement]:
            return Provider("faulty", lambda options, facts: build())

    return Faulty()


@pytest.fixture(name="bench")
def bench_(request, tmp_path_factory) -> Bench:
    return session_bench(request, tmp_path_factory)


def test_a_placement_that_copies_passes(bench: Bench):
    gate(Copied).test_moved_weights_are_the_same_bytes(bench)
    gate(Copied).test_identity(bench, "half")


def test_other_weights_give_other_logits(bench: Bench):
    """The engine computes with what was moved."""
    with pytest.raises(AssertionError, match="logits first differ"):
        gate(lambda: Copied(spoil=True)).test_identity(bench, "off")


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: Copied(spoil=True), "has other bytes after it was placed"),
        (lambda: Copied(lambda index, at: at + 8), "not aligned to 32 bytes"),
        (lambda: Copied(lambda index, at: at - 32 * (index == 1)), "overlap"),
    ],
    ids=["spoilt", "crooked", "overlapping"],
)
def test_weights_that_moved_wrongly_are_found(bench: Bench, build: Callable[[], DensePlacement], told: str):
    with pytest.raises(AssertionError, match=told):
        gate(build).test_moved_weights_are_the_same_bytes(bench)


class Strange(Copied):
    def __init__(self, placed: Placement) -> None:
        super().__init__()
        self.placed = placed

    def place(self, tensors: Sequence[DenseTensor], /) -> Any:
        return self.placed


@pytest.mark.parametrize(
    ("placed", "told"),
    [
        (Placement(0, None, {"blk.99.nothing": 64}), "moved what it was not given"),
        (Placement(4096, None), "owns bytes, but moved nothing"),
        (Placement(0, -1), "resident_bytes"),
    ],
)
def test_a_report_that_cannot_be_is_found(bench: Bench, placed: Placement, told: str):
    with pytest.raises(AssertionError, match=told):
        gate(lambda: Strange(placed)).test_moved_weights_are_the_same_bytes(bench)
