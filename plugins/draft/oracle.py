"""Knows what comes next, and is right as often as it is told to be: for tests, and for what drafts could be worth.

Given a text, it proposes the tokens after the place where a generation is; each is right with the same probability, by
a draw that depends on nothing but seed and place. A wrong one is the right one plus one. The draft costs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import Drafter, Facts, Options, Proposal


class OracleOptions(Options):
    """The text and how much of it is given away."""

    text: tuple[int, ...] = Field(description="token ids of the whole text, prompt and continuation")
    acceptance: float = Field(default=1.0, ge=0, le=1, description="how often a proposed token is the right one")
    branching: int = Field(default=1, ge=1, le=8, description="candidates for each position, one of them as above")
    seed: int = Field(default=0, ge=0, description="of the draws")


class Oracle:
    """Reads on in a text that it was given."""

    def __init__(self, options: OracleOptions, n_vocab: int) -> None:
        self._options, self._n_vocab = options, n_vocab

    def draft(self, context: Sequence[int], limit: int, /) -> Proposal:
        options, at = self._options, len(context)
        depth = limit if options.branching == 1 else -(-limit // options.branching)
        tokens: list[int] = []
        parents: list[int] = []
        above = -1
        for place in range(at, min(at + depth, len(options.text))):
            right = random.Random(f"{options.seed} {place}").random() < options.acceptance
            first = len(tokens)
            for candidate in range(options.branching):
                if len(tokens) < limit:
                    tokens.append((options.text[place] + candidate + (not right)) % self._n_vocab)
                    parents.append(above)
            above = first
        return Proposal(tuple(tokens), tuple(parents))

    def accepted(self, count: int, /) -> None:
        """It knew."""


def _build(options: OracleOptions, facts: Facts, /) -> Drafter:
    return Oracle(options, facts.model.n_vocab)


@hookimpl
def bmoe_drafters() -> list[Provider[Drafter]]:
    """Return the drafter that knows the text."""
    return [
        Provider(
            "oracle",
            _build,
            OracleOptions,
            trees=lambda options: options.branching > 1,
            trials=({"text": ()},),
            summary="knows the text, for tests",
        )
    ]
