"""What one decode verifies: the last token of the text, and candidates for those after it as a tree.

A chain is a tree with one path. Each path is a sequence of llama.cpp: a token is a part of the sequences of all paths
through it, so that it sees what precedes it and nothing beside it. The first path is sequence 0, which holds the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from bmoe.drafts import NOTHING, Proposal


@dataclass(frozen=True)
class Tree:
    """``tokens[0]`` is the last token of the text, the others are candidates; a parent comes before its children.

    Columns of the length of ``tokens``: ``parent`` (-1 for the root), ``depth`` from 0, and ``path_probability``, the
    product of the draft's probabilities from the root; empty where the draft has none.
    """

    tokens: tuple[int, ...]
    parent: tuple[int, ...]
    depth: tuple[int, ...]
    path_probability: tuple[float, ...] = ()

    @classmethod
    def of(cls, last: int, proposal: Proposal = NOTHING) -> Tree:
        """The tree of a proposal that follows the token ``last``; the proposal must have no :func:`flaw`."""
        count = len(proposal.tokens)
        above = proposal.parent or tuple(range(-1, count - 1))
        depth, odds = [0], [1.0]
        for index, parent in enumerate(above):
            depth.append(depth[parent + 1] + 1)
            if proposal.probability is not None:
                odds.append(odds[parent + 1] * proposal.probability[index])
        known = tuple(odds) if proposal.probability is not None else ()
        return cls((last, *proposal.tokens), (-1, *(parent + 1 for parent in above)), tuple(depth), known)

    @property
    def drafted(self) -> int:
        """How many candidates there are."""
        return len(self.tokens) - 1

    def child(self, index: int, token: int) -> int | None:
        """The candidate ``token`` after the one at ``index``."""
        return self._children.get((index, token))

    @property
    def paths(self) -> int:
        """How many paths there are from the root to a leaf."""
        return len(self.tokens) - len(set(self.parent) - {-1})

    @cached_property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """The paths that each token is on, as numbers from 0; empty for a chain, all of which is on path 0."""
        if self.paths == 1:
            return ()
        on: list[list[int]] = [[] for _ in self.tokens]
        inner = set(self.parent)
        leaves = self._from_first_path(index for index in range(len(self.tokens)) if index not in inner)
        for path, leaf in enumerate(leaves):
            index = leaf
            while index >= 0:
                on[index].append(path)
                index = self.parent[index]
        return tuple(tuple(paths) for paths in on)

    def path_of(self, index: int) -> int:
        """A path through the token at ``index``."""
        return self.sequences[index][0] if self.sequences else 0

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = {}
        for index, token in enumerate(self.tokens):
            found.setdefault((self.parent[index], token), index)
        return found

    def _from_first_path(self, leaves: object) -> list[int]:
        """Leaves, that of the path of first children first, so that the likeliest path is the text's own sequence."""
        first: dict[int, int] = {}
        for index, parent in enumerate(self.parent):
            first.setdefault(parent, index)
        leaf = 0
        while leaf in first:
            leaf = first[leaf]
        return sorted(leaves, key=lambda index: (index != leaf, index))  # type: ignore[call-overload, no-any-return]


def flaw(proposal: Proposal, limit: int, n_vocab: int, *, trees: bool) -> str:
    """What is wrong with a proposal, in words that follow its drafter's name; "" if nothing is."""
    tokens, parent, odds = proposal.tokens, proposal.parent, proposal.probability
    if len(tokens) > limit:
        return f"proposes {len(tokens)} tokens where at most {limit} were asked for"
    for token in tokens:
        if not _whole(token) or not 0 <= token < n_vocab:
            return f"proposes {token!r}, no token of this model (0 to {n_vocab - 1})"
    if parent and len(parent) != len(tokens):
        return f"gives {len(parent)} parents for {len(tokens)} tokens"
    for index, above in enumerate(parent):
        if not _whole(above) or not -1 <= above < index:
            return f"gives token {index} the parent {above!r}; it must be -1 or come before it"
    if not trees and any(above != index - 1 for index, above in enumerate(parent)):
        return "proposes a tree, which its provider does not say (trees)"
    if odds is not None and (len(odds) != len(tokens) or not all(0 <= each <= 1 for each in odds)):
        return "gives probabilities that are not one in 0 to 1 for each token"
    return ""


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
