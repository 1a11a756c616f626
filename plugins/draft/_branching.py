"""What drafters that have a model guess have in common: how wide and how deep they draft, and when they stop."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from bmoe.candidates import comb
from bmoe.contracts import DraftHost, Options, Proposal


class BranchingOptions(Options):
    """The form of a draft."""

    branching: int = Field(default=1, ge=1, le=8, description="candidates for each position; 1 = a chain")
    depth: int = Field(default=0, ge=0, le=64, description="positions ahead, at most; 0 = as the draft's length allows")
    least: float = Field(default=0.0, ge=0, le=1, description="ends before a token less likely than this")


def branches(options: BranchingOptions) -> bool:
    """Whether it proposes trees."""
    return options.branching > 1


class Guessed:
    """Drafts what its host guesses: the chain of the likeliest tokens, with the next likeliest as leaves beside it."""

    def __init__(self, options: BranchingOptions) -> None:
        self._options = options
        self._host: DraftHost | None = None

    def attach(self, host: DraftHost, /) -> None:
        """Guesses come from ``host``."""
        self._host = host

    def draft(self, context: Sequence[int], limit: int, /) -> Proposal:
        options = self._options
        assert self._host is not None
        depth = min(limit, options.depth or -(-limit // options.branching))
        return comb(self._host.guess(depth, branching=options.branching, least=options.least), limit)

    def accepted(self, count: int, /) -> None:
        """A model does not learn from it."""
