"""Prompt lookup: where the text has said the same before, what followed then is proposed now.

The longest match goes first, of equally long ones the latest, as in BigMoeOnEdge's drafter. It costs no decode and no
memory, and helps where a text repeats itself: code, lists, quotations, answers about a document in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from bmoe import Provider, hookimpl
from bmoe.contracts import Drafter, Facts, Options, Proposal


class NgramOptions(Options):
    """What counts as a match."""

    min_match: int = Field(default=2, ge=1, le=64, description="tokens that must agree before anything is proposed")
    max_match: int = Field(default=12, ge=1, le=256, description="tokens that are compared at most")
    branching: int = Field(default=1, ge=1, le=8, description="matches whose continuations are proposed; 1 = a chain")

    @model_validator(mode="after")
    def _ordered(self) -> NgramOptions:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match = {self.min_match} is above max_match = {self.max_match}")
        return self


class Ngram:
    """Finds where the end of a text stands in it before."""

    def __init__(self, options: NgramOptions) -> None:
        self._options = options

    def draft(self, context: Sequence[int], limit: int, /) -> Proposal:
        found = self._matches(context)
        if self._options.branching == 1 or len(found) < 2:
            return Proposal(tuple(context[found[0] : found[0] + limit])) if found else Proposal(())
        return _tree([context[start : start + limit] for start in found], limit)

    def accepted(self, count: int, /) -> None:
        """The text says it."""

    def _matches(self, text: Sequence[int]) -> list[int]:
        """Where to go on from, best first: the places after matches, of which no two are followed by the same token."""
        options, last = self._options, len(text) - 1
        found: list[tuple[int, int]] = []
        for end in range(last - 1, -1, -1):
            if text[end] != text[last]:
                continue
            length = 1
            while length < min(options.max_match, end + 1) and text[end - length] == text[last - length]:
                length += 1
            if length >= options.min_match:
                found.append((length, end + 1))
                if length == options.max_match and options.branching == 1:
                    break
        found.sort(key=lambda match: (-match[0], -match[1]))
        starts: dict[int, int] = {}
        for _, start in found:
            starts.setdefault(text[start], start)
        return list(starts.values())[: options.branching]


def _tree(paths: Sequence[Sequence[int]], limit: int) -> Proposal:
    """Continuations as one tree: the first is as long as there is room, the others get the first tokens of theirs."""
    tokens: list[int] = []
    parents: list[int] = []
    share = max(1, limit // (len(paths) + 1))
    for index, path in enumerate(paths):
        above, room = -1, limit - len(tokens)
        length = room - share * (len(paths) - 1) if index == 0 else min(room, share)
        for token in path[: max(0, length)]:
            tokens.append(token)
            parents.append(above)
            above = len(tokens) - 1
    return Proposal(tuple(tokens), tuple(parents))


def _build(options: NgramOptions, facts: Facts, /) -> Drafter:
    return Ngram(options)


@hookimpl
def bmoe_drafters() -> list[Provider[Drafter]]:
    """Return the drafter by prompt lookup."""
    return [
        Provider(
            "ngram",
            _build,
            NgramOptions,
            trees=lambda options: options.branching > 1,
            trials=({"min_match": 1}, {"min_match": 1, "branching": 3}),
            summary="proposes what followed the last time",
        )
    ]
