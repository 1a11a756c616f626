"""The drafts of one conversation: asks its drafter, checks what it proposes, and has the governor judge each round.

What guesses tokens for a drafter is the matter of :mod:`bmoe.guessers`, how a draft is verified that of
:mod:`bmoe.decode`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bmoe.contracts import Drafter, Hosted, Proposal
from bmoe.costs import DecodeCost
from bmoe.decode import Draft
from bmoe.draftlength import DraftLength, Round
from bmoe.engine import Stopped
from bmoe.errors import BmoeError, PluginError
from bmoe.guessers import Guesser
from bmoe.plan import Plan
from bmoe.problems import cause, toml_value
from bmoe.tree import Tree, flaw


@dataclass(frozen=True, slots=True)
class Deeds:
    """What a conversation does for its drafts: verify a tree, keep a path of it, and say how much may be decoded.

    ``keep`` returns the bytes that were read for the other tokens alone; ``unsay`` drops so many of the last tokens.
    ``again``: what it has cost, since it was asked last, to decode tokens anew that a memory could not go back to.
    """

    verify: Callable[[Tree], DecodeCost]
    keep: Callable[[Tree, Sequence[int]], int]
    unsay: Callable[[int], None]
    width: Callable[[], int]
    again: Callable[[], DecodeCost]


class Drafting:
    """Rounds of draft and verification, as :class:`bmoe.decode.Rounds` says.

    ``text`` are the tokens in the conversation's KV, as they change. ``length`` is asked how long a draft may be.
    """

    def __init__(
        self, plan: Plan, drafter: Drafter, guesser: Guesser | None, text: Sequence[int], n_vocab: int, deeds: Deeds
    ) -> None:
        assert plan.draft is not None
        assert plan.profile.draft is not None
        self._drafter, self._guesser, self._text, self._deeds = drafter, guesser, text, deeds
        self._n_vocab, self._trees = n_vocab, plan.trees
        self._said = f"{plan.profile.where('draft.drafter')} = {toml_value(plan.draft.name)}"
        self.length = DraftLength(plan.max_draft, governor=plan.profile.draft.governor)
        self._began = self._seconds = 0.0
        if guesser is not None and isinstance(drafter, Hosted):
            drafter.attach(guesser)

    def propose(self, last: int, room: int) -> Tree:
        """Candidates for the tokens after ``last``, as many as the governor, ``room`` and the batch width allow.

        Raises PluginError if the drafter fails or proposes what is no draft; whatever a decode raises.
        """
        self._began = time.perf_counter()
        limit = min(self.length.limit, room, self._deeds.width() - 1)
        proposal = self._drafted([*self._text, last], limit) if limit > 0 else Proposal(())
        self._seconds = time.perf_counter() - self._began
        return Tree.of(last, proposal)

    def verify(self, tree: Tree) -> DecodeCost:
        """Decode a tree with logits for all of its tokens; without candidates, a plain decode."""
        return self._deeds.verify(tree)

    def keep(self, tree: Tree, kept: Sequence[int], cost: DecodeCost) -> Draft:
        """Cut the text to the tokens at ``kept``, tell the drafter, and have the round judged."""
        wasted = self._deeds.keep(tree, kept) if tree.drafted else 0
        accepted = len(kept) - 1
        if tree.drafted:
            self._ask(lambda: self._drafter.accepted(accepted))
        own = self._guesser.spent() if self._guesser is not None else DecodeCost()
        steps = own.decodes * self._guesser.share if self._guesser is not None else 0.0
        again = self._deeds.again()
        steps += again.decodes
        own.add(again)
        read = cost.all_bytes + own.all_bytes
        took = time.perf_counter() - self._began
        self.length.ended(Round(tree.drafted, accepted, took, read, 1 + steps))
        return Draft(tree.drafted, accepted, max(tree.depth), own, self._seconds, wasted)

    def unsay(self, count: int) -> None:
        """The last ``count`` tokens that were kept are not asked for any more."""
        self._deeds.unsay(count)

    def _drafted(self, text: Sequence[int], limit: int) -> Proposal:
        if self._guesser is not None:
            self._guesser.begin(text)
        try:
            proposal = self._ask(lambda: self._drafter.draft(text, limit))
        finally:
            if self._guesser is not None:
                self._guesser.end()
        if not isinstance(proposal, Proposal):
            raise PluginError(f"{self._said} returns {type(proposal).__name__}, no Proposal; correct the plugin")
        wrong = flaw(proposal, limit, self._n_vocab, trees=self._trees)
        if wrong:
            raise PluginError(f"{self._said} {wrong}; correct the plugin")
        return proposal

    def _ask(self, what: Callable[[], Proposal | None]) -> Proposal | None:
        try:
            return what()
        except (BmoeError, Stopped):
            raise
        except Exception as error:
            raise PluginError(f"{self._said} failed; correct its options or the plugin ({cause(error)})") from error
