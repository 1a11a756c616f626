"""Prefill and the token loop over one context: what is decoded, in which order, and what each decode cost."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bmoe.contracts import Phase
from bmoe.costs import DecodeCost
from bmoe.native.model import Context
from bmoe.native.sampler import Sampler
from bmoe.tree import Tree

Decode = Callable[[Sequence[int], Phase], DecodeCost]
"""Runs one llama_decode of at most one ubatch; raises whatever stopped it."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What became of a round's draft, which may have been empty: ``accepted`` of ``drafted`` tokens.

    Its longest path had ``depth`` tokens. ``cost`` is of the drafter's own decodes, ``seconds`` of all that drafting
    took, Python included; ``wasted_bytes`` were read in the verify decode for rejected tokens alone.
    """

    drafted: int = 0
    accepted: int = 0
    depth: int = 0
    cost: DecodeCost = field(default_factory=DecodeCost)
    seconds: float = 0.0
    wasted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One chosen token and the cost of the decode that its logits came from, with the draft that the decode verified.

    Of several tokens from one decode the first has its cost and draft, the others cost nothing.
    """

    token: int
    cost: DecodeCost
    is_end: bool
    draft: Draft | None = None


def prefill(
    decode: Decode, tokens: Sequence[int], ubatch: int, total: DecodeCost, phase: Phase = "prefill"
) -> DecodeCost:
    """Decode the prompt in pieces of ``ubatch`` tokens, so that it can be stopped between them; adds to ``total``."""
    for start in range(0, len(tokens), ubatch):
        total.add(decode(tokens[start : start + ubatch], phase))
    return total


def token_loop(
    decode: Decode,
    context: Context,
    sampler: Sampler,
    prompt_cost: DecodeCost,
    limit: int,
    digest: hashlib._Hash | None,
) -> Generator[Step, None, None]:
    """Choose up to ``limit`` tokens; each is decoded only when the one after it is asked for.

    ``digest`` is fed the float32 logits row of every token chosen, in order. A token that ends the text is the last.
    """
    cost = prompt_cost
    for index in range(limit):
        token, end = _choose(context, sampler, digest)
        yield Step(token, cost, end)
        if end or index + 1 == limit:
            return
        cost = decode([token], "decode")


class Rounds(Protocol):
    """Rounds of draft and verification over one context."""

    def propose(self, last: int, room: int) -> Tree:
        """Candidates for up to ``room`` tokens after ``last``, which was chosen and is not decoded yet."""

    def verify(self, tree: Tree) -> DecodeCost:
        """Decode all of a tree, with logits for every token of it."""

    def keep(self, tree: Tree, kept: Sequence[int], cost: DecodeCost) -> Draft:
        """Of the tree that was decoded at this cost the tokens at ``kept`` are text; nothing is left of the others."""

    def unsay(self, count: int) -> None:
        """The last ``count`` tokens that were kept are not asked for any more."""


def draft_loop(
    rounds: Rounds,
    context: Context,
    sampler: Sampler,
    prompt_cost: DecodeCost,
    limit: int,
    digest: hashlib._Hash | None,
) -> Generator[Step, None, None]:
    """As :func:`token_loop`, with several tokens from one decode wherever a draft said before what would be chosen.

    The sampler chooses every token from the model's own logits, and a drafted one is accepted if it is what was chosen.
    So whatever is drafted, each token is drawn as it would have been without, one draw each: the distribution is the
    model's at any temperature, and a seeded text stays the same as far as the logits do. For a draft that names one
    token this is speculative sampling: it is accepted with the probability that the model gives it.
    """
    token, end = _choose(context, sampler, digest)
    yield Step(token, prompt_cost, end)
    count = 1
    while not end and count < limit:
        tree = rounds.propose(token, limit - count - 1)
        cost = rounds.verify(tree)
        kept, chosen = [0], list[int]()
        while True:
            token, end = _choose(context, sampler, digest, kept[-1] if tree.drafted else -1)
            chosen.append(token)
            follower = tree.child(kept[-1], token)
            if end or follower is None:
                break
            kept.append(follower)
        draft: Draft | None = rounds.keep(tree, kept, cost)
        said = 0
        try:
            for each in chosen:
                said += 1
                yield Step(each, cost, end and said == len(chosen), draft)
                cost, draft = cost.nothing(), None
        finally:  # the one who asks may stop at any token
            rounds.unsay(len(chosen) - max(1, said))
        count += len(chosen)


def _choose(context: Context, sampler: Sampler, digest: hashlib._Hash | None, row: int = -1) -> tuple[int, bool]:
    """The token after that at ``row``, and whether it ends the text."""
    if digest is not None:
        digest.update(context.logits(row).tobytes())
    token = sampler.next(context, row)
    return token, context.model.is_end(token)
