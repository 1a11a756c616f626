"""The gate of dense placements: subclass :class:`DenseGates`, name the plugin, and pytest proves the contract."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from bmoe.contracts import (
    CacheFacts,
    DensePlacement,
    DenseTensor,
    Facts,
    FetchFacts,
    ModelFacts,
    Placement,
    Provider,
    Repacking,
)
from bmoe.native import mapping, memory
from bmoe.plan import Plan
from bmoe.resolve import resolve
from bmoe.synth import Shape
from bmoe.testing.archs import UBATCH, ArchGates, Bench, Cell, session_bench
from bmoe.testing.load import IN_TREE, load_provider

_NO_MODEL = ModelFacts("", "", "", (), 0, 0, 0, 0, 0, 0, 0, (), ())
_ALIGNMENT = 32  # TENSOR_ALIGNMENT of ggml's CPU buffers (ggml/src/ggml-backend.cpp)


@pytest.mark.gate
class DenseGates:
    """Proves that a dense placement keeps its contract. A subclass sets class attributes and nothing else.

    ``plugin`` is the entry point of group ``bmoe.plugins`` (``"bmoe"`` for in-tree ones) that provides ``provider``.
    ``shape`` is that of the tiny model, for a placement that does nothing with the weights of the usual one.
    """

    plugin: ClassVar[str]
    provider: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    shape: ClassVar[str | Shape] = "tiny-qwen3moe"

    def load(self) -> Provider[DensePlacement]:
        """The provider under test, by name."""
        return load_provider("dense", self.plugin, self.provider)

    def build(self, model: ModelFacts) -> DensePlacement:
        """A fresh placement for a model; what this machine lacks is a reason to skip."""
        provider = self.load()
        missing = provider.available()
        if missing:
            pytest.skip(missing)
        fetch = FetchFacts(tuple(shard.path for shard in model.shards), 1, True, 8)
        return provider.build(provider.options(**self.options), Facts(model, CacheFacts(0, 0, 8), fetch))

    @pytest.fixture(name="bench")
    def _bench(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
        return session_bench(request, tmp_path_factory)

    def test_is_lossless(self) -> None:
        """Where weights live cannot change the output."""
        assert not self.load().lossy

    def test_moved_weights_are_the_same_bytes(self, bench: Bench) -> None:
        """What moved is whole, aligned, apart from the rest, and counted; nothing is written where it came from."""
        path = bench.models.path(self.shape)
        model = _facts(path)
        content = np.fromfile(path, dtype=np.uint8)  # a copy stands for the model's mapping
        before = content.copy()
        tensors = [
            DenseTensor(t.name, content.ctypes.data + t.offset, t.nbytes, t.shard, t.offset) for t in model.dense
        ]
        placement = self.build(model)
        placed = placement.place(tensors)
        try:
            _check(placed, tensors)
            assert placed.moved or not getattr(placement, "copies", False), "copies weights, but moved none"
            for tensor in tensors:
                at = placed.moved.get(tensor.name, tensor.address)
                same = bytes(memory.view(at, tensor.nbytes)) == before[tensor.offset :][: tensor.nbytes].tobytes()
                assert same, f"{tensor.name} has other bytes after it was placed"
            assert (content == before).all(), "the model's own weights were written"
        finally:
            placement.close()
        placement.close()

    @pytest.mark.parametrize("budget", ["off", "half"])
    def test_identity(self, bench: Bench, budget: str) -> None:
        """Logits are those of plain llama.cpp, byte for byte."""
        self._placed().check(bench, Cell(budget))

    def test_what_moved_left_the_mapping(self, bench: Bench) -> None:
        """The place where a moved weight was cannot be read any more, and a weight that stayed still can."""
        placed = self._placed()
        with placed.open(placed.model(bench), Cell()) as (engine, _):
            assert engine.placement is not None
            moved = {*engine.placement.moved, *engine.repacked}
            if memory.count_mappings() == 0:
                pytest.skip("this system does not list a process's mappings")
            vacated = {base: mapping.vacated(engine.facts, moved)[shard] for shard, base in engine.model.bases.items()}
            left = [(base + first, base + last) for base, spans in vacated.items() for first, last in spans]
            assert accessible(left) == [], "a weight that moved can still be read where it was"
            assert engine.released_bytes <= sum(last - first for first, last in left)
            works = isinstance(engine.hot.dense, Repacking) or getattr(engine.hot.dense, "copies", False)
            assert bool(moved) == bool(engine.released_bytes) == works, "the placement did nothing"
            assert engine.record.resolved["dense"]["placed_bytes"] == engine.placement.placed_bytes

    def _placed(self) -> ArchGates:
        """The gate of an architecture, with this placement; skips where this machine cannot run it."""
        provider, options = self.load(), self.options
        if missing := provider.available():
            pytest.skip(missing)

        class Placed(ArchGates):
            plugin, provider, arch, shape = IN_TREE, "qwen3moe", "qwen3moe", self.shape

            def table(self, path: Path, cell: Cell, ubatch: int = UBATCH) -> dict[str, Any]:
                table = super().table(path, cell, ubatch)
                if hasattr(built, "repacks"):  # which has its own reference: the same, resident
                    table["dense"] = {"placement": known.name, "options": dict(options)}
                return table

            def plan(self, path: Path, cell: Cell) -> Plan:
                plan = super().plan(path, cell)
                dense = replace(plan.dense, name=known.name, provider=known, options=known.options(**options))
                return replace(plan, dense=dense)

        known, built = provider, self.build(_NO_MODEL)
        built.close()
        return Placed()


def _check(placed: Placement, tensors: list[DenseTensor]) -> None:
    size = {tensor.name: tensor.nbytes for tensor in tensors}
    unknown = sorted(set(placed.moved) - set(size))
    assert unknown == [], f"moved what it was not given: {unknown}"
    spans = sorted((address, address + size[name], name) for name, address in placed.moved.items())
    crooked = [name for first, _, name in spans if first % _ALIGNMENT]
    assert crooked == [], f"not aligned to {_ALIGNMENT} bytes: {crooked}"
    crossing = [(a[2], b[2]) for a, b in itertools.pairwise(spans) if a[1] > b[0]]
    assert crossing == [], f"overlap: {crossing}"
    assert placed.placed_bytes >= sum(size[name] for name in placed.moved), "owns fewer bytes than it moved"
    assert placed.placed_bytes == 0 or placed.moved, "owns bytes, but moved nothing"
    assert placed.resident_bytes is None or placed.resident_bytes >= 0


def _facts(path: Path) -> ModelFacts:
    return resolve({"model": {"path": str(path)}, "cache": {"budget_mb": 0}}).facts


def accessible(ranges: Sequence[tuple[int, int]]) -> list[str]:
    """Mappings of this process through which any of these address ranges could be read."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode = line.split()[:2]
        low, high = (int(part, 16) for part in place.split("-"))
        if mode != "---p" and any(low < last and first < high for first, last in ranges):
            found.append(line)
    return found
