"""A KV and its token history over an engine: generate, cancel, and an account of what it cost."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bmoe.account import Account
from bmoe.contracts import BatchContext, Phase, RunSummary, TokenRecord
from bmoe.costs import DecodeCost
from bmoe.decode import draft_loop, prefill, token_loop
from bmoe.drafting import Deeds, Drafting
from bmoe.engine import Engine, Stopped
from bmoe.errors import ModelError
from bmoe.guessers import Guesser, TrunkGuesser, make_guesser
from bmoe.head import DraftHead, HeadGuesser
from bmoe.native.model import Context
from bmoe.native.sampler import Sampler, SamplingOptions
from bmoe.tree import Tree

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token: its id, the text that it completes (may be empty inside a character), and its record."""

    id: int
    text: str
    record: TokenRecord


@dataclass(slots=True)
class _Prompt:
    """A prompt that is being read: its first position, how much its tokens matter, and how many parts were decoded."""

    start: int = 0
    importance: tuple[float, ...] = ()
    request: str = ""
    parts: int = 0


class Conversation:
    """``tokens`` is what the KV holds; ``summary`` describes the last generation once it has ended, in whatever way."""

    def __init__(self, engine: Engine) -> None:
        """Create the KV. Raises NativeError if there is no memory for it."""
        self._engine = engine
        self._context = Context(engine.model, engine.context_options(), callbacks=engine.seam)
        self._cancelled = False
        self._prompt = _Prompt()
        # the KV of a conversation that nobody keeps is freed with it
        self._free = weakref.finalize(self, self._context.close)
        self.tokens: list[int] = []
        self.summary: RunSummary | None = None
        self._group = 0
        self._again = DecodeCost()
        self._guesser: Guesser | None = None
        self.drafting = self._make_drafting()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(
        self, prompt: str | Sequence[int], max_tokens: int = 128, *, hash_logits: bool = False, append: bool = False
    ) -> Iterator[Token]:
        """Yield up to ``max_tokens`` tokens that continue ``prompt`` (text, or token ids).

        Starts from an empty KV, or with ``append`` after what this conversation holds. Ends early at an end-of-text
        token, on :meth:`cancel`, or when the context is full. Raises ModelError if the prompt does not fit. If a read
        or a plugin fails, its error is raised and the conversation is as it was after the last complete decode.
        """
        tokens = self._engine.model.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        held = len(self.tokens) if append else 0
        room = self._engine.plan.ctx - held
        if not tokens:
            raise ModelError("the prompt is empty; give at least one token")
        if len(tokens) >= room:
            raise ModelError(
                f"the prompt has {len(tokens)} tokens and the context has room for {room - 1} and an answer; "
                f"shorten it or raise model.ctx (now {self._engine.plan.ctx})"
            )
        if any(not 0 <= token < self._engine.model.n_vocab for token in tokens):
            raise ModelError(f"the prompt has a token id outside 0..{self._engine.model.n_vocab - 1}")
        prompt_cost = self._begin(tokens, held)
        if not append:
            self._reset()
        return self._generate(tokens, min(max_tokens, room - len(tokens)), max_tokens, hash_logits, prompt_cost)

    def feed(self, tokens: Sequence[int], phase: Phase = "prefill") -> DecodeCost:
        """Decode given tokens after what the conversation holds, choosing none; what that cost.

        ``phase`` is what plugins are told that they are.

        For evaluation and benchmarks. :meth:`logits` is then the row after the last of them.
        """
        cost = self._begin(tokens, len(self.tokens)) if phase == "prefill" else DecodeCost()
        return prefill(self._decode, tokens, self._engine.width, cost, phase)

    def verify(self, tree: Tree) -> DecodeCost:
        """Decode the last token of the text, which is not held yet, and candidates after it, with logits for each.

        What it cost; a tree without candidates is a plain decode. Otherwise :meth:`keep` says what of it is text.
        """
        if not tree.drafted:
            return self._decode(tree.tokens, "decode")
        held = len(self.tokens)
        self._group += 1
        batch = BatchContext(
            "verify",
            tuple(held + depth for depth in tree.depth),
            seq_ids=tuple(tree.path_of(index) for index in range(len(tree.tokens))),
            depth=tree.depth,
            parent=tree.parent,
            path_probability=tree.path_probability,
            group=self._group,
            is_output=(True,) * len(tree.tokens),
            request_id=self._prompt.request,
        )
        self._context.mark(len(tree.tokens))
        try:
            return self._engine.verify(self._context, tree, batch, lambda: self._cancelled)
        except BaseException:
            self._restore()
            raise

    def keep(self, tree: Tree, kept: Sequence[int]) -> int:
        """Hold the tokens at ``kept`` of the tree that was verified last, a path from its root, and no others of it.

        The bytes that were read for the others alone.
        """
        tokens = [tree.tokens[index] for index in kept]
        length = len(self.tokens) + len(tokens)
        whole, wasted = self._engine.keep(self._context, tree.path_of(kept[-1]), kept, length)
        if whole:
            self.tokens.extend(tokens)
            if self._guesser is not None:
                self._guesser.read(tokens, kept)
        else:
            self._again.add(self._hold([*self.tokens, *tokens]))
        return wasted

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        """The logits after the last decoded token, or after that at ``row`` of a tree; float32 [n_vocab], as a copy."""
        found: NDArray[np.float32] = self._context.logits(row).copy()
        return found

    def rewind(self, length: int) -> DecodeCost:
        """Keep the first ``length`` tokens and forget those after them; what that cost.

        Where a memory cannot be cut (recurrent layers), tokens that are kept are decoded again, mostly all of them.
        :meth:`logits` says nothing new before the next decode. Raises ModelError if there are fewer tokens.
        """
        if not 0 <= length <= len(self.tokens):
            raise ModelError(f"cannot go back to {length} tokens: the conversation holds {len(self.tokens)}")
        return self._hold(self.tokens[:length])

    def clear(self) -> None:
        """Forget all tokens. The experts in memory stay."""
        self._reset()

    def cancel(self) -> None:
        """End the generation at the next node of the graph, from any thread; without one, the next ends at once."""
        self._cancelled = True
        self._engine.stop(self._context)

    def close(self) -> None:
        """Free the KV. May be called twice."""
        self._free()

    def _begin(self, prompt: Sequence[int], start: int) -> DecodeCost:
        """A new prompt: find out how much its tokens matter, if a routing policy asks. Raises PluginError."""
        began = time.perf_counter()
        importance = self._engine.importance(prompt)
        self._prompt = _Prompt(start, importance, self._engine.next_request())
        took = time.perf_counter() - began
        return DecodeCost(decode_s=took, manage_s=took) if importance else DecodeCost()

    def _generate(
        self, prompt: list[int], limit: int, wanted: int, hash_logits: bool, prompt_cost: DecodeCost
    ) -> Iterator[Token]:
        engine = self._engine
        s = engine.plan.profile.sampling
        options = SamplingOptions(s.temp, s.top_k, s.top_p, s.min_p, s.repeat_penalty, s.seed)
        sampler = Sampler(options, engine.model.n_vocab)
        account = Account(engine, hashlib.sha256() if hash_logits else None, self.drafting)
        text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        account.stop = "error"
        account.prefill.add(prompt_cost)
        self.summary = None
        try:
            with engine.run() as ending:
                try:
                    prefill(self._decode, prompt, engine.width, account.prefill)
                    rest = (self._context, sampler, account.prefill, limit, account.digest)
                    drafting = self.drafting
                    steps = token_loop(self._decode, *rest) if drafting is None else draft_loop(drafting, *rest)
                    # unless the loop says otherwise: the caller may stop asking
                    account.stop = "cancelled" if limit > 0 else "length"
                    with contextlib.closing(steps):
                        for step in steps:
                            if step.is_end:
                                account.stop = "eog"
                                account.spent(step)
                                break
                            piece = text.decode(engine.model.piece(step.token))
                            record = account.token(step, piece)
                            engine.sinks.token(record)
                            if account.tokens == limit:
                                account.stop = "length" if limit == wanted else "context"
                            engine.relieve()
                            yield Token(step.token, piece, record)
                            account.resumed()
                            if self._cancelled and drafting is not None and account.tokens < limit:
                                raise Stopped  # what is already accepted would come without a decode
                except Stopped:
                    account.stop = "cancelled"
                except BaseException as error:
                    if not isinstance(error, GeneratorExit):
                        account.stop = "error"
                    raise
                finally:
                    self.summary = ending[0] = account.summary()
        finally:
            self._cancelled = False
            sampler.close()

    def _decode(self, tokens: Sequence[int], phase: Phase) -> DecodeCost:
        held, count = len(self.tokens), len(tokens)
        outputs = tuple(index + 1 == count for index in range(count))
        part, reads_prompt = self._prompt, phase == "prefill"
        chain = range(count) if phase == "verify" else ()
        batch = BatchContext(
            phase,
            tuple(range(held, held + count)),
            depth=tuple(chain),
            parent=tuple(depth - 1 for depth in chain),
            ubatch=part.parts if reads_prompt else 0,
            is_output=outputs,
            importance=part.importance[held - part.start :][:count] if reads_prompt else (),
            request_id=part.request,
        )
        try:
            cost = self._engine.decode(self._context, tokens, batch, lambda: self._cancelled)
        except BaseException:
            self._restore()
            raise
        self.tokens.extend(tokens)
        part.parts += reads_prompt
        if self._guesser is not None and phase != "draft":
            self._guesser.read(tokens)
        return cost

    def _make_drafting(self) -> Drafting | None:
        engine, new_drafter = self._engine, self._engine.hot.new_drafter
        if new_drafter is None:
            return None
        if engine.plan.trees and engine.model.has_states:
            said = f"{engine.facts.path} keeps a state that paths of a tree cannot share"
            raise ModelError(f"{said}; set draft.options.branching = 1")
        context = self._context
        trunk = TrunkGuesser(lambda token: self._decode([token], "draft"), self.logits, self._cut, context.mark)
        if engine.plan.drafts_with_head:
            head = DraftHead(engine, context, lambda: self._cancelled, lambda: self._prompt.request)
            self._guesser = HeadGuesser(head, engine.facts.n_layer - engine.facts.n_nextn, engine.plan.ubatch)
        else:
            self._guesser = make_guesser(engine.plan, engine.draft_model, trunk)
        deeds = Deeds(self.verify, self.keep, self._unsay, lambda: engine.width, self._decoded_again)
        return Drafting(engine.plan, new_drafter(), self._guesser, self.tokens, engine.model.n_vocab, deeds)

    def _cut(self, length: int) -> None:
        """Keep the first ``length`` tokens of the text."""
        if length < len(self.tokens):
            self._again.add(self.rewind(length))

    def _unsay(self, count: int) -> None:
        """Drop the last ``count`` tokens, which were accepted but are not asked for any more."""
        if count:
            cancelled, self._cancelled = self._cancelled, False  # what was said stays, whoever stopped it
            try:
                self._hold(self.tokens[:-count])
            finally:
                self._cancelled = self._cancelled or cancelled

    def _hold(self, text: Sequence[int]) -> DecodeCost:
        """Hold ``text``, whose beginning is held; what it cost to decode again what could not be kept of it."""
        held = len(text) if self._context.truncate(len(text)) else self._context.go_back(len(text))
        self._shorten(held)
        if held == len(text):
            return DecodeCost()
        # plugins have heard of what follows a mark: nobody says again that it was accepted
        return self.feed(text[held:], "verify" if held else "prefill")

    def _decoded_again(self) -> DecodeCost:
        """What it cost since this was asked last."""
        again, self._again = self._again, DecodeCost()
        return again

    def _restore(self) -> None:
        """After a failed decode: the KV holds exactly ``tokens`` again, or as many as it can go back to."""
        if not self._context.truncate(len(self.tokens)):
            self._shorten(self._context.go_back(len(self.tokens)))

    def _reset(self) -> None:
        self._context.clear()
        self._shorten(0)

    def _shorten(self, length: int) -> None:
        """The KV holds the first ``length`` tokens of the text."""
        del self.tokens[length:]
        if self._guesser is not None:
            self._guesser.cut(length)
