"""What can be seen of a routing while it is announced: the ids, what the router gave, what it saw.

One object for all that look at the same routing, so that each array is looked up once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bmoe.contracts import BankFacts, BatchContext, RoutingEvent
from bmoe.native import tensor
from bmoe.native.router import RouterNodes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

OFFERED = frozenset({"topk", "probs", "scores", "activation"})
"""What a plugin may want to see of a routing."""


class Sight:
    """One routing of ``facts``' bank: views of llama.cpp's memory, valid until the handler of that routing returns.

    ``own`` is the model's own choice where a routing policy changed it. ``batch`` describes the rows of the arrays,
    ``rows`` are their places in the whole batch: of the last layer, llama.cpp computes those only whose logits were
    asked for.
    """

    def __init__(self, facts: BankFacts, nodes: RouterNodes, choice: int, batch: BatchContext) -> None:
        self.facts, self._nodes, self._choice = facts, nodes, choice
        self.ids: NDArray[np.int32] = tensor.matrix_i32(choice)
        self.own: NDArray[np.int32] | None = None
        self.rows = rows_of(batch, len(self.ids))
        self.batch = of_rows(batch, self.rows)

    @cached_property
    def probs(self) -> NDArray[np.float32] | None:
        """What the router gave to every expert, float32 [n_tokens, n_expert]; a softmax sums to 1 over all of them."""
        found = self._nodes.probs(self._choice)
        if found is None or not self._nodes.of_selected(self._choice):
            return found
        import numpy as np

        shares: NDArray[np.float32] = np.exp(found - found.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        return shares

    @cached_property
    def scores(self) -> NDArray[np.float32] | None:
        """What the experts were ranked by, float32 [n_tokens, n_expert]."""
        return self._nodes.scores(self._choice)

    @cached_property
    def ranking(self) -> NDArray[np.int32] | None:
        """All experts of each token, best first, int32 [n_tokens, n_expert]."""
        return self._nodes.ranking(self._choice)

    @cached_property
    def activation(self) -> NDArray[np.float32] | None:
        """The router's input, float32 [n_tokens, n_embd]."""
        return self._nodes.activation(self._choice)

    def event(self, wants: Collection[str]) -> RoutingEvent:
        """What an observer that wants these is shown."""
        return RoutingEvent(
            self.facts.layer,
            self.facts.bank,
            self.batch,
            self.ids,
            self.probs if "probs" in wants else None,
            self.scores if "scores" in wants else None,
            self.activation if "activation" in wants else None,
            self.own,
        )


def rows_of(batch: BatchContext, count: int) -> list[int]:
    """Which tokens of ``batch`` a layer computed ``count`` rows for: all of them, or those that are outputs."""
    outputs = [index for index, is_output in enumerate(batch.is_output) if is_output]
    total = len(batch.positions)
    return outputs if len(outputs) == count < total else list(range(max(0, total - count), total))


def of_rows(batch: BatchContext, rows: Sequence[int]) -> BatchContext:
    """``batch`` with these of its tokens alone."""
    count = len(batch.positions)
    if len(rows) == count:
        return batch
    cut: dict[str, Any] = {
        name: tuple(column[index] for index in rows)
        for name in ("positions", "seq_ids", "depth", "path_probability", "is_output", "importance")
        if len(column := getattr(batch, name)) == count
    }
    if len(batch.parent) == count:
        place = {index: row for row, index in enumerate(rows)}
        cut["parent"] = tuple(place.get(batch.parent[index], -1) for index in rows)
    return replace(batch, **cut)
