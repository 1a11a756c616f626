"""The model's own head for next-token prediction, which follows one conversation and guesses how it goes on.

Its KV has an entry for each token of the text, made of the token and the trunk's hidden state before it; an entry that
a guess made of the head's own states is dropped again. To fill the KV no expert is needed: the graph is cut at the
head's router. So experts are read for guesses alone, through the same store and fetcher as the trunk's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bmoe.candidates import likeliest
from bmoe.contracts import BatchContext, Level
from bmoe.costs import DecodeCost
from bmoe.engine import Engine
from bmoe.errors import NativeError
from bmoe.native import mtp
from bmoe.native.model import Context

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _never() -> bool:
    return False


def _of_no_prompt() -> str:
    return ""


class DraftHead:
    """The head of one conversation, whose ``trunk`` it listens to. All calls come from the thread that decodes there.

    After each decode of the trunk :meth:`remember` tells which of its tokens are text; :meth:`follow` brings the head's
    KV up to them, which :meth:`guess` does too. Whatever fails, text and KV still agree afterwards.
    """

    def __init__(
        self,
        engine: Engine,
        trunk: Context,
        cancelled: Callable[[], bool] = _never,
        request_id: Callable[[], str] = _of_no_prompt,
    ) -> None:
        """Create the head's KV; from now on ``trunk``, which is still empty, exports its hidden states.

        ``cancelled`` and :meth:`Engine.stop` of the trunk's context end the head's decodes too. ``request_id`` tells
        of which prompt they are. Raises NativeError if the engine was opened without its head, or for lack of memory.
        """
        if not engine.plan.drafts_with_head:
            raise NativeError(f"{engine.facts.path}: no drafter of the profile uses the head, so it was not opened")
        self._engine, self._trunk, self._cancelled, self._request_id = engine, trunk, cancelled, request_id
        self._ctx, self._width = engine.plan.ctx, engine.plan.ubatch
        mtp.export_states(trunk)
        self._context = mtp.open_head(engine.model, mtp.of_head(engine.context_options()), engine.seam)
        self._free = weakref.finalize(self, self._context.close)
        engine.close_first(self)
        # row p is the trunk's state before position p, zeros before the first; pages come as the text grows
        self._states: NDArray[np.float32] = np.zeros((self._ctx + 1, engine.model.n_embd), np.float32)
        self._text: list[int] = []
        self._held = 0
        self._guessed = -1  # the token after the text that has an entry because it was guessed from

    def __enter__(self) -> DraftHead:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Tokens of the text that it remembers."""
        return len(self._text)

    @property
    def nbytes(self) -> int:
        """What its context takes, as llama.cpp's log says, and the hidden states of a text of full length."""
        return sum(self._context.buffers.values()) + self._states.nbytes

    @property
    def held(self) -> int:
        """How many of them, the first ones, are in its KV."""
        return min(self._held, len(self._text))

    def remember(self, tokens: Sequence[int], places: Sequence[int] = ()) -> None:
        """Copy the hidden states of the trunk's last decode for ``tokens``, which continue the text.

        ``places`` are where they stand in that batch; left out, they are its first ones. Raises NativeError if that
        decode has no such tokens or the text grows beyond the context.
        """
        places = places or range(len(tokens))
        first, last = len(self._text), len(self._text) + len(tokens)
        if last > self._ctx or len(places) != len(tokens) or any(place < 0 for place in places):
            raise NativeError(f"{len(tokens)} tokens at {len(places)} places cannot follow {first} of {self._ctx}")
        if not tokens:
            return
        states = mtp.states(self._trunk, max(places) + 1)
        if self._held > first and tokens[0] != self._guessed:
            self._cut(first)
        self._states[first + 1 : last + 1] = states[list(places)]
        self._text.extend(tokens)

    def follow(self, upto: int | None = None) -> DecodeCost:
        """Bring the KV up to the first ``upto`` tokens of the text, left out: to all of them; what that cost.

        No expert is read for it where the model is streamed. Raises what a decode raises; the ubatches before stay.
        """
        cost, end = DecodeCost(), min(len(self._text), len(self._text) if upto is None else upto)
        while self._held < end:
            first, last = self._held, min(end, self._held + self._width)
            cost.add(self._decode(self._text[first:last], first, self._states[first:last], outputs=False))
        return cost

    def guess(self, last: int, depth: int, *, branching: int = 1, least: float = 0.0) -> tuple[list[Level], DecodeCost]:
        """Up to ``depth`` levels after ``last``, a token that was chosen and is not decoded yet; what they cost.

        Each level has the ``branching`` likeliest tokens, and the next one follows from the likeliest. They end before
        one whose likeliest has a probability below ``least``, and where the context is full. Raises what a decode
        raises.
        """
        levels: list[Level] = []
        cost, first = self.follow(), len(self._text)
        self._cut(first)
        token, state = last, self._states[first : first + 1]
        try:
            while len(levels) < min(depth, self._ctx - first):
                cost.add(self._decode([token], first + len(levels), state, outputs=True))
                level = likeliest(self._context.logits(), branching)
                if level[0][1] < least:
                    break
                levels.append(level)
                token, state = level[0][0], mtp.states(self._context, 1)
        finally:
            self._cut(first + 1)  # the entry of `last` rests on a true state
            self._guessed = last
        return levels, cost

    def truncate(self, length: int) -> None:
        """Remember the first ``length`` tokens alone, all of them if there are no more."""
        if length < len(self._text):
            del self._text[max(0, length) :]
            self._cut(len(self._text))

    def clear(self) -> None:
        """Forget the text."""
        self.truncate(0)
        self._cut(0)

    def close(self) -> None:
        """Free the KV. May be called twice."""
        self._free()

    def _decode(self, tokens: Sequence[int], first: int, states: NDArray[np.float32], *, outputs: bool) -> DecodeCost:
        """One decode of the head from position ``first`` on; if it fails, the KV ends before it."""
        positions = tuple(range(first, first + len(tokens)))
        outs, request = (outputs,) * len(tokens), self._request_id()
        batch = BatchContext("draft", positions, is_output=outs, request_id=request)
        try:
            cost = self._engine.perform(
                self._trunk,
                lambda: mtp.decode_head(self._context, tokens, first, states, outputs=outputs),
                batch,
                self._cancelled,
                cut=not outputs,
            )
        except BaseException:
            self._cut(first)
            raise
        self._held = first + len(tokens)
        return cost

    def _cut(self, length: int) -> None:
        """Drop the entries from position ``length`` on; what of them is text is computed anew when it is needed."""
        # unasked whether there are any: a decode that failed may have left some
        self._held = min(self._held, length) if self._context.truncate(length) else 0
        if not self._held:
            self._context.clear()


class HeadGuesser:
    """The head as a :class:`~bmoe.guessers.Guesser`: hears all of the text, guesses, and counts what that costs."""

    def __init__(self, head: DraftHead, n_trunk: int, lag: int) -> None:
        """``n_trunk`` layers are a whole decode, of which the head is one; it never lags ``lag`` tokens behind."""
        self.share = 1 / n_trunk
        self._head, self._lag, self._last = head, lag, 0
        self._spent = DecodeCost()

    def read(self, tokens: Sequence[int], places: Sequence[int] = ()) -> None:
        """Keep the trunk's states of these tokens; a long text is followed on the way: no draft waits for it."""
        self._head.remember(tokens, places)
        if len(self._head) - self._head.held >= self._lag:
            self._spent.add(self._head.follow())

    def cut(self, length: int) -> None:
        """Forget what follows."""
        self._head.truncate(length)

    def begin(self, text: Sequence[int]) -> None:
        """Note the last token."""
        self._last = text[-1]

    def guess(self, depth: int, /, *, branching: int = 1, least: float = 0.0) -> Sequence[Level]:
        """Chain the head's own guesses."""
        levels, cost = self._head.guess(self._last, depth, branching=branching, least=least)
        self._spent.add(cost)
        return levels

    def end(self) -> None:
        """The head drops its guesses by itself."""

    def spent(self) -> DecodeCost:
        """What the head's decodes have cost since this was asked last."""
        spent, self._spent = self._spent, DecodeCost()
        return spent

    def close(self) -> None:
        """Free the head's KV. May be called twice."""
        self._head.close()
