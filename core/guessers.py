"""What guesses tokens for a drafter: the model itself with a routing of the drafter's, or another, smaller model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bmoe.candidates import likeliest
from bmoe.contracts import Level, ModelFacts
from bmoe.costs import DecodeCost
from bmoe.draftmodel import read_draft_model
from bmoe.errors import ModelError, NativeError
from bmoe.native.model import Context, ContextOptions, Model
from bmoe.plan import Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Guesser(Protocol):
    """Guesses for the drafter of one conversation; a :class:`~bmoe.contracts.DraftHost` to it."""

    share: float
    """What part of a decode of the whole model one of its own decodes is."""

    def read(self, tokens: Sequence[int], places: Sequence[int] = ()) -> None:
        """The text goes on with ``tokens``, at ``places`` of the decode that just ended; left out, its first ones."""

    def cut(self, length: int) -> None:
        """The text is no longer than ``length``."""

    def begin(self, text: Sequence[int]) -> None:
        """A draft is asked for that continues ``text``, whose last token is not decoded yet."""

    def guess(self, depth: int, /, *, branching: int = 1, least: float = 0.0) -> Sequence[Level]:
        """As :meth:`DraftHost.guess <bmoe.contracts.DraftHost.guess>` says."""

    def end(self) -> None:
        """The draft is made, or it failed: the text is as it was."""

    def spent(self) -> DecodeCost:
        """What its own decodes have cost since this was asked last."""

    def close(self) -> None:
        """Give back what it holds."""


class _Unconcerned:
    """One that needs not hear how the text goes on before it is asked for a draft."""

    def read(self, tokens: Sequence[int], places: Sequence[int] = ()) -> None:
        """It is told in time."""

    def cut(self, length: int) -> None:
        """It is told in time."""


class TrunkGuesser(_Unconcerned):
    """The model itself in the conversation's own KV, under the drafter's routing policy for the phase ``draft``.

    ``decode`` runs one token after what the KV holds, ``logits`` are those after it, ``rewind`` cuts the KV again.
    ``mark`` is called where it will be cut.
    """

    share = 1.0

    def __init__(
        self,
        decode: Callable[[int], DecodeCost],
        logits: Callable[[], NDArray[np.float32]],
        rewind: Callable[[int], None],
        mark: Callable[[], None],
    ) -> None:
        self._decode, self._logits, self._rewind, self._mark = decode, logits, rewind, mark
        self._text: Sequence[int] = ()
        self._spent = DecodeCost()

    def begin(self, text: Sequence[int]) -> None:
        """Note the text; its last token is decoded when a guess is asked for."""
        self._text = text

    def guess(self, depth: int, /, *, branching: int = 1, least: float = 0.0) -> Sequence[Level]:
        """Decode the last token and then each guess after it, as far as one follows."""
        self._rewind(len(self._text) - 1)
        self._mark()
        return chain(self._next, self._text[-1], depth, branching, least)

    def end(self) -> None:
        """Cut the KV to the text less its last token."""
        if self._text:
            self._rewind(len(self._text) - 1)

    def spent(self) -> DecodeCost:
        """What the decodes of guesses have cost since this was asked last."""
        spent, self._spent = self._spent, DecodeCost()
        return spent

    def close(self) -> None:
        """It holds nothing."""

    def _next(self, token: int) -> NDArray[np.float32]:
        self._spent.add(self._decode(token))
        return self._logits()


class ModelGuesser(_Unconcerned):
    """Another model, held in memory, with a KV of its own that follows the text."""

    def __init__(self, facts: ModelFacts, model: Model, options: ContextOptions, share: float) -> None:
        """``model`` has the vocabulary of the one it guesses for; ``share`` as in :class:`Guesser`."""
        self.share = share
        self._facts, self._options = facts, options
        self._context = Context(model, options)
        self._held: list[int] = []
        self._text: Sequence[int] = ()
        self._spent = DecodeCost()

    def begin(self, text: Sequence[int]) -> None:
        """Note the text; it is read when a guess is asked for."""
        self._text = text

    def guess(self, depth: int, /, *, branching: int = 1, least: float = 0.0) -> Sequence[Level]:
        """Read what of the text it has not read, and then each guess after it, as far as one follows."""
        self._return_to(self._text[:-1])
        missing = self._text[len(self._held) : -1]
        for start in range(0, len(missing), self._options.ubatch):
            self._read(missing[start : start + self._options.ubatch])
        self._context.mark()
        return chain(lambda token: self._read([token]), self._text[-1], depth, branching, least)

    def end(self) -> None:
        """Go back to what of the text was read, its last token included, which stays."""
        self._return_to(self._text)

    def spent(self) -> DecodeCost:
        """Decodes and their time since this was asked last; what they read of the file is not measured."""
        spent, self._spent = self._spent, DecodeCost()
        return spent

    def close(self) -> None:
        """Free the KV. May be called twice."""
        self._context.close()

    def _return_to(self, text: Sequence[int]) -> None:
        """Hold no token that is not one of ``text``; a memory that cannot be cut goes back as far as it can."""
        same = 0
        while same < min(len(self._held), len(text)) and self._held[same] == text[same]:
            same += 1
        if same == len(self._held):
            return
        held = same if self._context.truncate(same) else self._context.go_back(same)
        del self._held[held:]

    def _read(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        began = time.perf_counter()
        code = self._context.decode(tokens)
        if code:
            self._context.clear()
            self._held.clear()
            raise NativeError(f"{self._facts.path}: the draft model cannot go on: llama_decode returned {code}")
        self._held.extend(tokens)
        self._spent.add(DecodeCost(1, time.perf_counter() - began))
        row: NDArray[np.float32] = self._context.logits()
        return row


def chain(
    after: Callable[[int], NDArray[np.float32]], last: int, depth: int, branching: int, least: float
) -> list[Level]:
    """Up to ``depth`` levels: each the likeliest tokens of the row ``after`` the likeliest of the level before."""
    levels: list[Level] = []
    token = last
    while len(levels) < depth:
        level = likeliest(after(token), branching)
        if level[0][1] < least:
            break
        levels.append(level)
        token = level[0][0]
    return levels


def make_guesser(plan: Plan, draft_model: Model | None, trunk: TrunkGuesser) -> Guesser | None:
    """What guesses for the drafter of a conversation, whose own model ``trunk`` is; None if it needs nothing."""
    if plan.draft is None or plan.draft.provider.guesses == "":
        return None
    if draft_model is None:
        return trunk
    facts = read_draft_model(draft_model.path)
    model = plan.profile.model
    options = ContextOptions(
        ctx=plan.ctx,
        ubatch=plan.ubatch,
        threads=plan.threads,
        kv_type=model.kv_type,
        flash_attention=model.flash_attention,
    )
    share = facts.dense_bytes / max(1, plan.facts.dense_bytes + plan.facts.cycle_bytes)
    return ModelGuesser(facts, draft_model, options, share)


def open_draft_model(plan: Plan, model: Model) -> Model | None:
    """Open the other model that drafts for ``model``, if the plan has one. Raises ModelError if it cannot."""
    if plan.draft is None or plan.draft.provider.guesses != "model":
        return None
    facts = read_draft_model(str(getattr(plan.draft.options, "model", "")))
    draft = Model(facts, keep_experts_out=False)
    try:
        same_vocabulary(draft, model, plan.profile.where("draft.options.model"))
    except BaseException:
        draft.close()
        raise
    return draft


def same_vocabulary(draft: Model, model: Model, option: str) -> None:
    """ModelError unless both models mean the same by every token. ``option`` says where the draft model was named."""
    said = f"{option}: {draft.path} has another vocabulary than {model.path}"
    remedy = "choose a draft model of the same family"
    if draft.n_vocab != model.n_vocab:
        raise ModelError(f"{said} ({draft.n_vocab} tokens, not {model.n_vocab}); {remedy}")
    for token in range(model.n_vocab):
        mine, theirs = model.piece(token, special=True), draft.piece(token, special=True)
        if mine != theirs or model.is_end(token) != draft.is_end(token):
            raise ModelError(f"{said} (token {token} is {theirs!r}, not {mine!r}); {remedy}")
