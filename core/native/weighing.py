"""Where a graph weighs the experts that it has chosen: the nodes at which a slot can be given no weight.

Between a choice and the products with its experts lie the gathering of the chosen ones' probabilities, in most
architectures their division by their sum or a softmax over them, in some a scale. Found by structure while the graph is
captured, kept by name. Source: ``llm_graph_context::build_moe_ffn`` in llama.cpp's src/llama-graph.cpp.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bmoe.native import tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Normalising = Literal["plain", "norm", "softmax"]
_CHOICE = b"ffn_moe_topk-"
_WEIGHTS = b"ffn_moe_weights"
_SUMS = frozenset({"SUM_ROWS", "CLAMP"})
_SAME = frozenset({"RESHAPE", "VIEW", "SCALE"})
_WHOLE: dict[str, Normalising] = {"DIV": "norm", "SOFT_MAX": "softmax"}


@dataclass(frozen=True, slots=True)
class Weighing:
    """The nodes of one choice: ``gathered`` has the raw weights, ``last`` those that the experts are multiplied by.

    ``kind`` says what makes the weights a whole in between: nothing, a division by their sum, a softmax over them.
    """

    gathered: bytes
    last: bytes
    kind: Normalising


class WeighingFinder:
    """Is shown the nodes of a graph in their order; :attr:`found` is by the name of the choice."""

    def __init__(self) -> None:
        self.found: dict[str, Weighing] = {}
        self._choice = 0
        self._name = ""
        self._chain: set[int] = set()

    def see(self, address: int) -> None:
        """The next node of the graph."""
        node = tensor.at(address)
        if node.name.startswith(_CHOICE):
            self._choice, self._name, self._chain = address, node.name.decode(), set()
            return
        if not self._choice:
            return
        op, sources = tensor.op_name(node.op), {source for source in node.src if source}
        if op == "GET_ROWS" and not self._chain and node.src[1] == self._choice and node.ne[0] == 1:
            self.found[self._name] = Weighing(node.name, node.name, "plain")
            self._chain = {address}
        elif sources & self._chain:
            if op not in _SUMS and op not in _SAME and op not in _WHOLE:
                self._choice = 0  # the first that uses the weights
                return
            self._chain.add(address)
            if op not in _SUMS:
                before = self.found[self._name]
                # a node that llama.cpp leaves without a name of its own is called by its number in one graph
                last = node.name if node.name.startswith(_WEIGHTS) else before.last
                self.found[self._name] = Weighing(before.gathered, last, _WHOLE.get(op, before.kind))


def weights(address: int, tokens: int, slots: int) -> NDArray[np.float32]:
    """The weights of a node of :class:`Weighing`, float32 [tokens, slots]; a view of llama.cpp's memory.

    Nodes have them as [slots, tokens], or with an axis of one before, fastest first.
    """
    import numpy as np

    node = tensor.at(address)
    first = int((node.ne[0], node.ne[1], node.ne[2]) == (1, slots, tokens))
    strides = node.nb[first + 1], node.nb[first]
    size = (tokens - 1) * strides[0] + (slots - 1) * strides[1] + 4
    memory = (ctypes.c_char * size).from_address(node.data or 0)
    found: NDArray[np.float32] = np.ndarray((tokens, slots), np.float32, memory, strides=strides)
    return found
