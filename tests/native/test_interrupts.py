"""An interrupt that reaches a callback before its first statement is not lost, whoever could only print it."""

import ctypes
import sys

import pytest

from bmoe.contracts import BankFacts, ProjectionFacts
from bmoe.native.evalhook import PythonSeam
from bmoe.native.tensor import GgmlTensor

BANKS = (BankFacts(0, 0, 4, 1, (ProjectionFacts("blk.0.ffn_up_exps.weight", "ffn_up_exps", 0, 0, 64, "F32"),)),)


class Interrupted(PythonSeam):
    def _eval(self, address, ask, user):
        raise KeyboardInterrupt("as if a signal had come")


def call(seam):
    node = GgmlTensor(name=b"ffn_moe_topk-0")
    return seam._eval_callback(ctypes.addressof(node), False, None)


def test_an_interrupt_outside_every_handler_ends_the_decode_and_is_raised():
    seam, before = Interrupted(BANKS), sys.unraisablehook
    seam.begin()
    call(seam)  # what C is told is undefined; the latch decides
    assert seam.stopped
    with pytest.raises(KeyboardInterrupt, match="as if a signal"):
        seam.finish()
    assert sys.unraisablehook is before
    seam.begin()
    assert not seam.stopped
    seam.finish()
    assert sys.unraisablehook is before


def test_what_cannot_be_raised_elsewhere_is_reported_as_always(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    seam = PythonSeam(BANKS)
    seam.begin()

    class Fragile:
        def __del__(self):
            raise ValueError("on its way out")

    fragile = Fragile()
    del fragile
    seam.finish()
    assert ["on its way out"] == [str(report.exc_value) for report in seen]
