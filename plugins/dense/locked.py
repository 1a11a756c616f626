"""Dense placement ``locked``: weights outside the experts cannot be swapped or dropped, whatever else needs memory.

Locking needs a limit that allows it (RLIMIT_MEMLOCK) or CAP_IPC_LOCK. That is looked at before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import DensePlacement, DenseTensor, Facts, ModelFacts, Options, Placement
from bmoe.errors import NativeError
from bmoe.native import memory, residency
from bmoe_plugins.dense._copying import bytes_of, copy_into, make_runs, size_of_copy


class LockedOptions(Options):
    """What is locked."""

    copy_weights: bool = Field(default=True, description="copies of the weights, and not the model's mapping itself")


class Locked:
    """Owns one region, or locks the pages of the mapping, which are unlocked when the model is unmapped."""

    def __init__(self, options: LockedOptions, facts: Facts) -> None:
        """NativeError with the remedy if the limit is too low."""
        refusal = residency.lock_refusal(_holds(options, facts.model))
        if refusal:
            raise NativeError(refusal)
        self.copies = options.copy_weights
        self._facts = facts
        self._region: memory.Region | None = None

    def place(self, tensors: Sequence[DenseTensor], /) -> Placement:
        """Lock all, one run of neighbours after the other; NativeError if the kernel refuses one of them."""
        return self._copy(tensors) if self.copies else self._in_place(tensors)

    def _copy(self, tensors: Sequence[DenseTensor]) -> Placement:
        self._region = memory.reserve(bytes_of(tensors), huge=True)
        return copy_into(self._region, tensors, self._facts, residency.lock)

    def _in_place(self, tensors: Sequence[DenseTensor]) -> Placement:
        runs, resident = make_runs(tensors), 0
        for run in runs:
            residency.lock(run.address, run.nbytes)
            resident += residency.resident_bytes(run.address, run.nbytes) or 0
        return Placement(0, resident)

    def close(self) -> None:
        """Give the region back, and its locks with it. May be called twice."""
        if self._region is not None:
            self._region.close()


def _holds(options: LockedOptions, model: ModelFacts) -> int:
    return size_of_copy(model)


@hookimpl
def bmoe_dense() -> Sequence[Provider[DensePlacement]]:
    """Locked memory."""
    summary = "keep dense weights in memory with mlock"
    return [Provider("locked", Locked, LockedOptions, holds=_holds, summary=summary)]
