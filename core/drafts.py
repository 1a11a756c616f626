"""What crosses the seam between core and drafters: what proposes the tokens that may come next.

Plugins take these from :mod:`bmoe.contracts`, which has all that crosses the seam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

Level: TypeAlias = tuple[tuple[int, float], ...]
"""Candidates for one position, each a token with its probability, the likeliest first."""

Guessing: TypeAlias = Literal["", "trunk", "head", "model"]
"""What guesses tokens for a drafter: nothing, the model itself with a routing of the drafter's, the model's head for
next-token prediction, or another model."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens: a chain, or a tree if ``parent`` is given (index into ``tokens``, -1 = the last real token).

    A parent comes before its children. ``probability``: the draft's own probability of each token given its parent,
    None where it has none.
    """

    tokens: tuple[int, ...]
    parent: tuple[int, ...] = ()
    probability: tuple[float, ...] | None = None


NOTHING = Proposal(())
"""No draft: the round is a plain decode."""


class Drafter(Protocol):
    """Proposes the tokens that may come next. One is built for each conversation.

    Optional: ``attach(host, /)``, see :class:`Hosted`; ``routing``, the routing policy of phase ``draft`` with which a
    drafter whose provider says ``guesses = "trunk"`` has the model itself run.
    """

    def draft(self, context: Sequence[int], limit: int, /) -> Proposal:
        """Up to ``limit`` tokens that continue ``context`` (all tokens so far)."""

    def accepted(self, count: int, /) -> None:
        """``count`` tokens of the last proposal were accepted."""


class DraftHost(Protocol):
    """Has a model guess for a drafter, which never sees it."""

    def guess(self, depth: int, /, *, branching: int = 1, least: float = 0.0) -> Sequence[Level]:
        """Up to ``depth`` levels that continue the text of the draft in progress, ``branching`` candidates in each.

        Each level follows from the likeliest candidates of those before. They end before one whose likeliest has a
        probability below ``least``. Raises what a decode raises.
        """


@runtime_checkable
class Hosted(Protocol):
    """Optional side of drafters: is given what guesses for it, before the first draft."""

    def attach(self, host: DraftHost, /) -> None:
        """Guesses come from ``host``, during :meth:`Drafter.draft` alone."""
