"""What crosses the seam between core and drafters: what proposes the tokens that may come next.

Plugins take these from :mod:`bmoe.contracts`, which has all that crosses the seam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens: a chain, or a tree if ``parent`` is given (index into ``tokens``, -1 = the last real token).

    ``probability``: the draft's own probability of each token given its parent, None where it has none.
    """

    tokens: tuple[int, ...]
    parent: tuple[int, ...] = ()
    probability: tuple[float, ...] | None = None


class Drafter(Protocol):
    """Proposes the tokens that may come next."""

    def draft(self, context: Sequence[int], limit: int, /) -> Proposal:
        """Up to ``limit`` tokens that continue ``context`` (all tokens so far)."""

    def accepted(self, count: int, /) -> None:
        """``count`` tokens of the last proposal were accepted."""
