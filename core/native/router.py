"""What a router computed, found from the node of its choice: by structure, since not every graph names every node.

While a routing is announced, nothing of its layer was computed after it. Then what it was chosen by is in memory still,
since its weights are gathered from there next; the router's input is as a rule, because the experts read it too.
Source: ``llm_graph_context::build_moe_ffn`` in llama.cpp's src/llama-graph.cpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

from bmoe.native import tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PROBABILITIES, _DEEPEST = b"ffn_moe_probs-", 12
_SRC, _NAME, _DATA, _VIEW = (tensor.offset_of(field) for field in ("src", "name", "data", "view_src"))
Path = tuple[int, ...]
"""A way through a graph: of each node on it, which source comes next."""


class RouterNodes:
    """The nodes around one bank's choice. Where they are is learnt once, and checked by name whenever it is used.

    All addresses are of ``struct ggml_tensor``; ``choice`` is that of the bank's chosen ids. Arrays are views that are
    valid while the choice is being announced.
    """

    def __init__(self, n_expert: int) -> None:
        self._n_expert = n_expert
        self._to_probs: Path | None = None
        self._to_input: Path | None = None
        self._selected: bool | None = None

    def probs(self, choice: int) -> NDArray[np.float32] | None:
        """What the router gave to every expert, [n_tokens, n_expert], before biases that serve the choice alone.

        Of a graph that takes the softmax of the selected ones only, what it gave before any softmax. None if the graph
        does not show it.
        """
        found = self._probs(choice)
        return tensor.matrix_f32(found) if found and _u64(found + _DATA) else None

    def of_selected(self, choice: int) -> bool:
        """Whether :meth:`probs` are logits, of which the graph takes the softmax once it has selected."""
        if self._selected is None:
            found = self._probs(choice)
            self._selected = bool(found) and tensor.op_name(tensor.at(found).op) in ("MUL_MAT", "ADD")
        return self._selected

    def scores(self, choice: int) -> NDArray[np.float32] | None:
        """What the experts were ranked by, [n_tokens, n_expert]; -inf where a group of experts is ruled out.

        None if the choice is no view of a ranking of all experts.
        """
        ranking = self._ranking(choice)
        source = _u64(ranking + _SRC) if ranking else 0
        if not source:
            return None
        node = tensor.at(source)
        return tensor.matrix_f32(source) if node.data and node.ne[0] == self._n_expert else None

    def ranking(self, choice: int) -> NDArray[np.int32] | None:
        """All experts of each token, best first, [n_tokens, n_expert]; None if the graph ranks only the chosen ones."""
        found = self._ranking(choice)
        return tensor.matrix_i32(found) if found else None

    def activation(self, choice: int) -> NDArray[np.float32] | None:
        """The router's input, [n_tokens, n_embd], unless the graph has overwritten it; None if there is none."""
        probs = self._probs(choice)
        if not probs:
            return None
        if self._to_input is None:
            self._to_input = _way(probs, lambda node: tensor.op_name(tensor.at(node).op) == "MUL_MAT") or ()
        product = _follow(probs, self._to_input)
        if not product or tensor.op_name(tensor.at(product).op) != "MUL_MAT":
            return None
        source = _u64(product + _SRC + 8)
        node = tensor.at(source)
        return tensor.matrix_f32(source) if node.data and node.type == tensor.TYPE_F32 else None

    def _probs(self, choice: int) -> int:
        if self._to_probs is not None:
            found = _follow(choice, self._to_probs)
            if found and _is_probs(found, self._n_expert):
                return found
        self._to_probs = _way(choice, lambda node: _is_probs(node, self._n_expert))
        return _follow(choice, self._to_probs) if self._to_probs is not None else 0

    def _ranking(self, choice: int) -> int:
        source = _u64(choice + _VIEW)
        if not source:
            return 0
        node = tensor.at(source)
        whole = node.ne[0] == self._n_expert and node.type == tensor.TYPE_I32
        return source if whole and node.data and tensor.op_name(node.op) == "ARGSORT" else 0


def _u64(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _follow(node: int, path: Path) -> int:
    for step in path:
        if not node:
            return 0
        node = _u64(node + _SRC + 8 * step)
    return node


def _is_probs(node: int, n_expert: int) -> bool:
    if ctypes.string_at(node + _NAME, len(_PROBABILITIES)) != _PROBABILITIES:
        return False
    found = tensor.at(node)
    return found.ne[0] == n_expert and found.type == tensor.TYPE_F32


def _way(start: int, found: Callable[[int], bool]) -> Path | None:
    """The shortest path to a node that is looked for, over the sources; None if there is none nearby."""
    level: dict[int, Path] = {start: ()}
    for _ in range(_DEEPEST):
        following: dict[int, Path] = {}
        for address, path in level.items():
            if found(address):
                return path
            for step in range(tensor.MAX_SRC):
                source = _u64(address + _SRC + 8 * step)
                if source and source not in level:
                    following.setdefault(source, (*path, step))
        level = following
    return None
