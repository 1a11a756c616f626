"""Dense placement ``repack``: llama.cpp rearranges weights outside the experts for its fastest kernels.

Experts keep the layout of the file, so they can be streamed. Rearranged weights sum up in another order: the output is
that of the same profile with ``stream.enabled = false``, and not that of another placement.
"""

from __future__ import annotations

from collections.abc import Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import DensePlacement, DenseTensor, Facts, ModelFacts, Options, Placement, TensorFacts
from bmoe.errors import NativeError
from bmoe.native import repack


class Repack:
    """Names what this processor has kernels for; the memory is llama.cpp's."""

    def repacks(self, tensors: Sequence[TensorFacts], /) -> Sequence[str]:
        """By type and shape; what the graph does with them is not known here."""
        return [tensor.name for tensor in tensors if repack.supported(tensor.type_name, tensor.shape)]

    def place(self, tensors: Sequence[DenseTensor], /) -> Placement:
        """The others stay mapped."""
        return Placement(placed_bytes=0, resident_bytes=None)

    def close(self) -> None:
        """Nothing to release."""


def _build(options: Options, facts: Facts) -> Repack:
    return Repack()


def _holds(options: Options, model: ModelFacts) -> int:
    try:
        return sum(t.nbytes for t in model.dense if repack.supported(t.type_name, t.shape))
    except NativeError:  # without llama.cpp a plan can be made all the same
        return model.dense_bytes


@hookimpl
def bmoe_dense() -> Sequence[Provider[DensePlacement]]:
    """Rearranged weights."""
    return [
        Provider("repack", _build, holds=_holds, summary="let llama.cpp rearrange dense weights for this processor")
    ]
