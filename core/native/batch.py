"""One ``llama_batch`` with the columns that the binding's short form leaves out: positions, sequences, outputs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bmoe.native import lib

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TRUNK = (0,)


class Batch:
    """Room for up to ``capacity`` tokens, filled anew for every decode; what llama.cpp is given points into it."""

    def __init__(self, capacity: int) -> None:
        self._llama = lib.llama()
        self._tokens = (ctypes.c_int32 * capacity)()
        self._positions = (ctypes.c_int32 * capacity)()
        self._counts = (ctypes.c_int32 * capacity)()
        self._sequences = (ctypes.POINTER(ctypes.c_int32) * capacity)()
        self._outputs = (ctypes.c_int8 * capacity)()
        self._named: dict[tuple[int, ...], Any] = {}
        self._hidden: Any = None

    def continuing(self, tokens: Sequence[int]) -> Any:
        """Tokens that come after those in the KV, in its one sequence; the last of them is an output."""
        count = len(tokens)
        self._tokens[:count] = list(tokens)
        return self._llama.llama_batch_get_one(self._tokens, count)

    def placed(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[tuple[int, ...]] = (),
        *,
        outputs: bool = True,
        hidden: NDArray[np.float32] | None = None,
    ) -> Any:
        """Tokens at these positions, all of them outputs or none.

        ``sequences`` are those that each token is a part of; left out, all are of sequence 0. ``hidden``, float32
        [n_tokens, n_embd], goes with the tokens to a head for next-token prediction.
        """
        count = len(tokens)
        self._tokens[:count], self._positions[:count] = list(tokens), list(positions)
        self._outputs[:count] = [int(outputs)] * count
        for row in range(count):
            mine = sequences[row] if sequences else _TRUNK
            self._counts[row], self._sequences[row] = len(mine), self._ids(mine)
        batch = self._llama.llama_batch()
        batch.n_tokens, batch.token, batch.pos = count, self._tokens, self._positions
        batch.n_seq_id, batch.seq_id, batch.logits = self._counts, self._sequences, self._outputs
        self._hidden = hidden  # must outlive the decode
        if hidden is not None:
            batch.embd = hidden.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return batch

    def _ids(self, sequences: tuple[int, ...]) -> Any:
        if sequences not in self._named:
            self._named[sequences] = (ctypes.c_int32 * len(sequences))(*sequences)
        return ctypes.cast(self._named[sequences], ctypes.POINTER(ctypes.c_int32))
