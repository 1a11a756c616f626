"""Dense placement ``anon``: weights outside the experts are read, past the page cache, into memory of the process.

Anonymous memory can have huge pages, and under pressure it is not the first thing that the kernel gives up.
"""

from __future__ import annotations

from collections.abc import Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import DensePlacement, DenseTensor, Facts, ModelFacts, Options, Placement
from bmoe.native import memory
from bmoe_plugins.dense._copying import bytes_of, copy_into, size_of_copy


class Anonymous:
    """Owns one region with every tensor that it is given."""

    copies = True

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._region: memory.Region | None = None

    def place(self, tensors: Sequence[DenseTensor], /) -> Placement:
        """Read them; ReadError names the read that failed, NativeError the memory that was not granted."""
        self._region = memory.reserve(bytes_of(tensors), huge=True)
        return copy_into(self._region, tensors, self._facts)

    def close(self) -> None:
        """Give the region back. May be called twice."""
        if self._region is not None:
            self._region.close()


def _build(options: Options, facts: Facts) -> Anonymous:
    return Anonymous(facts)


def _holds(options: Options, model: ModelFacts) -> int:
    return size_of_copy(model)


@hookimpl
def bmoe_dense() -> Sequence[Provider[DensePlacement]]:
    """Copies in anonymous memory."""
    summary = "read dense weights into the process's own memory"
    return [Provider("anon", _build, holds=_holds, summary=summary)]
