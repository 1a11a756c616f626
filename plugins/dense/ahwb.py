"""Dense placement ``ahwb``: weights outside the experts in Android's hardware buffers, which are never reclaimed.

Experimental and unverified on a device: its logic is tested with a stand-in for the system's library. It does not fall
back to other memory, so that a comparison never compares a placement with itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import DensePlacement, DenseTensor, Facts, ModelFacts, Options, Placement
from bmoe.native import hardware_buffer, memory
from bmoe_plugins.dense._copying import ForgivingCopier, Run, make_runs, size_of_copy


class HardwareBuffers:
    """Owns buffers that each hold several runs of neighbouring weights; no buffer has more than ``most`` bytes."""

    copies = True

    def __init__(self, facts: Facts, library: str = "libandroid.so", most: int = hardware_buffer.MOST) -> None:
        self._facts, self._library, self._most = facts, library, most
        self._buffers: list[hardware_buffer.HardwareBuffer] = []

    def place(self, tensors: Sequence[DenseTensor], /) -> Placement:
        """Read them; what is too large for a buffer stays mapped, and a notice names it."""
        large = [tensor for tensor in tensors if _pages(tensor) > self._most]
        names = {tensor.name for tensor in large}
        runs = make_runs((tensor for tensor in tensors if tensor.name not in names), self._most)
        moved, copier = dict[str, int](), ForgivingCopier(self._facts)
        try:
            for group in _groups(runs, self._most):
                buffer = hardware_buffer.HardwareBuffer(sum(run.nbytes for run in group), self._library)
                self._buffers.append(buffer)
                at = buffer.address
                for run in group:
                    copier.read(run, at)
                    moved.update(run.places(at))
                    at += run.nbytes
        finally:
            copier.close()
        limit = f"is larger than a hardware buffer can be ({self._most} bytes) and stays mapped"
        notices = (*(f"{tensor.name} {limit}" for tensor in large), *copier.notices)
        return Placement(sum(buffer.nbytes for buffer in self._buffers), None, moved, notices)

    def close(self) -> None:
        """Release the buffers. May be called twice."""
        while self._buffers:
            self._buffers.pop().close()


def _pages(tensor: DenseTensor) -> int:
    return memory.round_up(tensor.offset + tensor.nbytes) - memory.round_down(tensor.offset)


def _groups(runs: Sequence[Run], most: int) -> list[list[Run]]:
    groups: list[list[Run]] = []
    room = 0
    for run in runs:
        if run.nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(run)
        room -= run.nbytes
    return groups


def _build(options: Options, facts: Facts) -> HardwareBuffers:
    return HardwareBuffers(facts)


def _holds(options: Options, model: ModelFacts) -> int:
    return size_of_copy(model)


@hookimpl
def bmoe_dense() -> Sequence[Provider[DensePlacement]]:
    """Android only."""
    summary = "hold dense weights in Android hardware buffers (unverified on a device)"
    return [
        Provider("ahwb", _build, experimental=True, available=hardware_buffer.missing, holds=_holds, summary=summary)
    ]
