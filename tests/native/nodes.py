"""Real tensors of routings, and both forms of the eval hook called with them as llama.cpp would."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

from bmoe.contracts import BankFacts, ExpertKey
from bmoe.errors import NativeError
from bmoe.native import lib, tensor
from bmoe.native.compiled import CSeam, compiled_seam_missing
from bmoe.native.evalhook import PythonSeam, Seam

COMPILED = pytest.mark.skipif(bool(compiled_seam_missing()), reason="the seam is not compiled")
SEAMS = [pytest.param(CSeam, marks=COMPILED, id="c"), pytest.param(PythonSeam, id="python")]


def banks_of(sizes: Sequence[tuple[int, int]]) -> list[BankFacts]:
    """Banks from (layer, n_expert)."""
    return [BankFacts(layer, 0, n_expert, min(2, n_expert), ()) for layer, n_expert in sizes]


class Node:
    """A real ``ggml_tensor`` in memory: a view of ids inside a wider, possibly strided matrix."""

    def __init__(
        self, name: bytes, ids: Sequence[Sequence[int]], step: int = 1, margin: int = 0, weight: int = 0
    ) -> None:
        """``step``: int32s from slot to slot. ``margin``: int32s of another expert between the rows.

        ``weight`` is the address of the tensor that it multiplies by.
        """
        slots, tokens = len(ids[0]), len(ids)
        row = (slots - 1) * step + 1 + margin
        self._data = (ctypes.c_int32 * (row * tokens))(*[-77] * (row * tokens))
        for token, chosen in enumerate(ids):
            for slot, expert in enumerate(chosen):
                self._data[token * row + slot * step] = expert
        self._tensor = tensor.GgmlTensor(type=tensor.TYPE_I32, name=name, data=ctypes.addressof(self._data))
        self._tensor.ne[:] = [slots, tokens, 1, 1]
        self._tensor.nb[:] = [4 * step, 4 * row, 4 * row * tokens, 4 * row * tokens]
        self._tensor.src[0] = weight
        self.address = ctypes.addressof(self._tensor)


class Driven:
    """A seam installed in real context parameters and called through them, as llama.cpp would."""

    def __init__(self, form: type[Seam], banks: Sequence[BankFacts]) -> None:
        self.seam = form(banks)
        self._params = lib.llama().llama_context_default_params()
        self.seam.install(self._params)
        self.calls: list[tuple[int, list[ExpertKey]]] = []
        self.seam.handler = self.handle

    def handle(self, bank: int, keys: list[ExpertKey]) -> None:
        self.calls.append((bank, list(keys)))

    def ask(self, node: Node) -> bool:
        return bool(self._params.cb_eval(node.address, True, self._params.cb_eval_user_data))

    def computed(self, node: Node) -> bool:
        return bool(self._params.cb_eval(node.address, False, self._params.cb_eval_user_data))

    def asked_and_computed(self, node: Node) -> bool:
        return self.ask(node) and self.computed(node)

    @property
    def aborts(self) -> bool:
        return bool(self._params.abort_callback(self._params.abort_callback_data))

    def outcome(self) -> str:
        """How the decode would end."""
        try:
            self.seam.finish()
        except NativeError as error:
            return str(error)
        return "fine"
