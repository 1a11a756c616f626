"""Dense placement ``mmap``: weights outside the experts stay where llama.cpp mapped them, as page cache."""

from __future__ import annotations

from collections.abc import Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import DensePlacement, DenseTensor, Facts, Options, Placement


class Mapped:
    """Moves nothing and owns nothing."""

    def place(self, tensors: Sequence[DenseTensor], /) -> Placement:
        """Report; what is resident is the kernel's to decide and is not measured here."""
        return Placement(placed_bytes=0, resident_bytes=None)

    def close(self) -> None:
        """Nothing to release."""


def _build(options: Options, facts: Facts) -> Mapped:
    return Mapped()


@hookimpl
def bmoe_dense() -> Sequence[Provider[DensePlacement]]:
    """The default."""
    return [Provider("mmap", _build, summary="leave dense weights in the model's own mapping")]
