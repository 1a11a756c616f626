"""Drives a model's head for next-token prediction (MTP): the only file to use symbols outside llama.cpp's public API.

The head is one more layer with a KV of its own. At position p it takes the token there and the trunk's hidden state of
position p - 1, and predicts token p + 1; its own hidden state takes the trunk's place when a draft is chained. It runs
in a second context of the same model. Source: ``graph_mtp`` in src/models/glm4-moe.cpp, ``llama-ext.h``.

llama.cpp ends the process where a model has no such head, so everything is checked before it is asked.
:class:`Head` holds a whole model in memory, for measurements; what the engine needs are the functions before it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bmoe.contracts import ModelFacts
from bmoe.errors import NativeError
from bmoe.headcheck import no_head
from bmoe.native import lib
from bmoe.native.model import Context, ContextOptions, Model

Rows: TypeAlias = NDArray[np.float32]

_CTX_TYPE_MTP = 1
_SYMBOLS = ("llama_set_embeddings_nextn", "llama_get_embeddings_nextn")


@functools.cache
def extension() -> Any:
    """llama-cpp-python's binding of what ``llama-ext.h`` declares; NativeError names what is missing."""
    name = "llama_cpp.llama_cpp_ext"
    lib.llama()
    try:
        module = importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        raise NativeError(f"{name} cannot be loaded ({error}); install a tested llama-cpp-python to draft") from error
    for symbol in _SYMBOLS:
        if not hasattr(module, symbol):
            raise NativeError(f"{name} has no {symbol}; install a tested llama-cpp-python to draft")
    return module


def check_head(facts: ModelFacts) -> None:
    """NativeError unless this model has a head that llama.cpp can run: it would end the process instead."""
    reason = no_head(facts)
    if reason:
        raise NativeError(f"{facts.path}: {reason}")


def export_states(trunk: Context) -> None:
    """From the next decode on have the hidden states of all rows of a trunk's context, see :func:`states`."""
    driven = extension()
    if not trunk.handle:
        raise NativeError(f"{trunk.model.path}: this conversation is closed; open another one")
    driven.llama_set_embeddings_nextn(trunk.handle, True, False)


def of_head(options: ContextOptions) -> ContextOptions:
    """Parameters of a context of the head, by those of one of the trunk."""
    return replace(options, ctx_type=_CTX_TYPE_MTP, outputs=1, rollback=0, sequences=1)


def open_head(model: Model, options: ContextOptions, callbacks: Any = None) -> Context:
    """A context of the model's head, for :func:`decode_head`; it exports the hidden states of outputs.

    Raises NativeError if the model was opened without its head, or for lack of memory.
    """
    if not model.has_head:
        raise NativeError(f"{model.path}: this model was opened without its head; open it with load_mtp")
    driven = extension()
    context = Context(model, replace(of_head(options), outputs=options.outputs), callbacks=callbacks)
    driven.llama_set_embeddings_nextn(context.handle, True, True)
    return context


def decode_head(head: Context, tokens: Sequence[int], first: int, hidden: Rows, *, outputs: bool) -> int:
    """Decode tokens from position ``first`` on, each with the hidden state before it; llama_decode's code.

    ``hidden`` is float32 [n, n_embd]. All rows are outputs or none: of a mixture llama.cpp returns the hidden states of
    other rows. NativeError where llama.cpp would end the process, or take what is no hidden state for one.
    """
    shape = (len(tokens), head.model.n_embd)
    if hidden.shape != shape:
        raise NativeError(f"hidden states of the shape {hidden.shape}, not {shape}")
    if head.options.ctx_type != _CTX_TYPE_MTP or not 0 < len(tokens) <= head.options.ubatch:
        raise NativeError(f"{head.model.path}: {len(tokens)} tokens cannot be decoded by this context of a head")
    if not all(0 <= token < head.model.n_vocab for token in tokens):  # -1 is how llama.cpp says that there is none
        raise NativeError(f"{head.model.path}: there is a token id outside 0..{head.model.n_vocab - 1}")
    rows = np.ascontiguousarray(hidden, np.float32)
    return head.decode_at(tokens, range(first, first + len(tokens)), outputs=outputs, hidden=rows)


def states(context: Context, count: int) -> Rows:
    """The hidden states of the first ``count`` tokens of the last decode, after the output norm, float32 [n, n_embd].

    A copy. NativeError if that decode had fewer tokens, or failed, or exported none.
    """
    if not context.handle or count > context.decoded:
        raise NativeError(f"{context.model.path}: the last decode has no hidden states of {count} tokens")
    return _copied(extension().llama_get_embeddings_nextn(context.handle), (count, context.model.n_embd), "states")


def _copied(pointer: Any, shape: tuple[int, int], what: str) -> Rows:
    if not pointer:
        raise NativeError(f"llama.cpp has no {what} for the last batch; install a tested llama-cpp-python")
    copied: Rows = np.ctypeslib.as_array(pointer, shape).copy()
    return copied


class Head:
    """Trunk and head of one model that is held in memory, over one sequence of tokens.

    The head always has as many positions in its KV as the trunk, all computed from the trunk's hidden states.
    """

    def __init__(self, facts: ModelFacts, options: ContextOptions) -> None:
        """Open the model with its head; ``options`` serve both contexts.

        Raises NativeError for a model whose head cannot be driven or a llama.cpp without the functions for it,
        ModelError if llama.cpp refuses the file.
        """
        check_head(facts)
        self._llama = lib.llama()
        self._n_ubatch, self._length = options.ubatch, 0
        self._hidden: Rows = np.zeros(facts.n_embd, np.float32)
        options = replace(options, outputs=options.ubatch)
        self.model = Model(facts, keep_experts_out=False, load_mtp=True)
        self._contexts: list[Context] = []
        try:
            self._trunk = Context(self.model, options)
            self._contexts.append(self._trunk)
            export_states(self._trunk)
            self._head = open_head(self.model, options)
            self._contexts.append(self._head)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Tokens fed so far."""
        return self._length

    @property
    def hidden(self) -> Rows:
        """The trunk's hidden state of the last token, after the output norm, float32 [n_embd]; zeros before any."""
        return np.array(self._hidden)

    def feed(self, tokens: Sequence[int]) -> tuple[Rows, Rows]:
        """Decode tokens with trunk and head. Return the logits of both after each of them, float32 [n, n_vocab].

        Row i of the trunk's logits ranks the token after ``tokens[i]``; so does row i of the head's, which knows the
        trunk's state of the token before.
        """
        trunk: list[Rows] = [np.empty((0, self.model.n_vocab), np.float32)]
        head = list(trunk)
        for start in range(0, len(tokens), self._n_ubatch):
            part = tokens[start : start + self._n_ubatch]
            try:
                said, after = self._decode(self._trunk, part, self._length, None)
                before = np.concatenate([self._hidden[None], after[:-1]])
                guessed, _ = self._decode(self._head, part, self._length, before)
            except BaseException:
                self._trunk.truncate(self._length)
                self._head.truncate(self._length)
                raise
            self._length += len(part)
            self._hidden = after[-1]
            trunk.append(said)
            head.append(guessed)
        return np.concatenate(trunk), np.concatenate(head)

    def draft(self, last: int, count: int) -> tuple[list[int], Rows]:
        """The head's greedy guesses of the ``count`` tokens after ``last``, which was not fed yet; nothing is kept.

        Each but the first rests on the one before. Also returns their logits, float32 [count, n_vocab].
        """
        token, state = last, self._hidden
        drafts, logits = [], np.empty((count, self.model.n_vocab), np.float32)
        try:
            for step in range(count):
                rows, after = self._decode(self._head, [token], self._length + step, state[None])
                logits[step], state = rows[0], after[0]
                token = int(rows[0].argmax())
                drafts.append(token)
        finally:
            self._head.truncate(self._length)
        return drafts, logits

    def verify(self, tokens: Sequence[int]) -> Rows:
        """The trunk's logits after each token, float32 [n, n_vocab], without keeping any of them."""
        if len(tokens) > self._n_ubatch:
            raise NativeError(f"{len(tokens)} tokens cannot be verified in a ubatch of {self._n_ubatch}; draft fewer")
        try:
            return self._decode(self._trunk, tokens, self._length, None)[0]
        finally:
            self._trunk.truncate(self._length)

    def clear(self) -> None:
        """Forget all tokens."""
        for context in self._contexts:
            context.clear()
        self._length = 0
        self._hidden = np.zeros_like(self._hidden)

    def close(self) -> None:
        """Free contexts and model. May be called twice."""
        while self._contexts:
            self._contexts.pop().close()
        self.model.close()

    def _decode(self, context: Context, tokens: Sequence[int], first: int, hidden: Rows | None) -> tuple[Rows, Rows]:
        """Logits and hidden states of all rows. ``hidden`` goes with tokens to the head and never to the trunk."""
        count = len(tokens)
        if not count or not context.handle:
            raise NativeError(f"{self.model.path}: nothing to decode, or this head is closed")
        if hidden is None:
            code = context.decode_at(tokens, range(first, first + count))
        else:
            code = decode_head(context, tokens, first, hidden, outputs=True)
        if code:
            reason = "no room in the KV cache; raise ctx" if code == 1 else f"llama_decode returned {code}"
            raise NativeError(f"{self.model.path}: {reason} (position {first})")
        logits = _copied(self._llama.llama_get_logits(context.handle), (count, self.model.n_vocab), "logits")
        return logits, states(context, count)
