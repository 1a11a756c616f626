"""The eval hook that times every node of the graph: the portable form, which closes a group at each of them.

It costs much more than it measures, so it is used for a compute trace per node and for nothing else. The compiled form
would gain nothing by it: Python is entered for every node anyway.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bmoe.contracts import BankFacts
from bmoe.native import tensor
from bmoe.native.evalhook import PythonSeam

_NOTHING = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
"""Operations that only say how memory is read."""


class NodeTimer(PythonSeam):
    """A :class:`PythonSeam` that isolates every node. What it hands over, and when, is the same."""

    def __init__(self, banks: Sequence[BankFacts]) -> None:
        super().__init__(banks)
        self._timed: list[tuple[str, str, float, float]] = []
        self._mine, self._asked = False, 0.0

    def timed(self) -> list[tuple[str, str, float, float]]:
        """Name, operation, begin and seconds of each node since the last call, by ``time.perf_counter``."""
        found, self._timed = self._timed, []
        return found

    def _eval(self, address: int, ask: bool, user: int | None, *more: Any) -> bool:
        try:
            if ask:
                self._mine = super()._eval(address, True, user)
                self._asked = time.perf_counter()
                return not self._stop
            now = time.perf_counter()
            node = tensor.at(address)
            op = tensor.op_name(node.op)
            if op not in _NOTHING:
                name = node.name.decode("utf-8", "replace")
                self._timed.append((name, op, self._asked, now - self._asked))
            return super()._eval(address, False, user) if self._mine else not self._stop
        except BaseException as error:  # noqa: BLE001 - nothing may cross C
            self.fail(error)
            return False
