"""Drives a model's head for next-token prediction (MTP): the only file to use symbols outside llama.cpp's public API.

The head is one more layer with a KV of its own. At position p it takes the token there and the trunk's hidden state of
position p - 1, and predicts token p + 1; its own hidden state takes the trunk's place when a draft is chained. It runs
in a second context of the same model. Source: ``graph_mtp`` in src/models/glm4-moe.cpp, ``llama-ext.h``.

llama.cpp ends the process where a model has no such head, so everything is checked before it is asked. Its batches have
outputs for all rows: with fewer it returns the hidden state of another row, and says nothing.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bmoe.contracts import ModelFacts
from bmoe.errors import NativeError
from bmoe.native import lib
from bmoe.native.model import Context, ContextOptions, Model

Rows: TypeAlias = NDArray[np.float32]

ARCHITECTURES = ("glm4moe",)
"""Those whose head was compared with its formula. Others export hidden states by other rules."""

_CTX_TYPE_MTP = 1
_SYMBOLS = ("llama_set_embeddings_nextn", "llama_get_embeddings_nextn")
_ASSERTED = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "ffn_gate_inp")


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
    if facts.arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise NativeError(f"{facts.path}: no head of architecture {facts.arch!r} can be driven yet (only of {known})")
    if facts.n_nextn != 1:
        found = f"{facts.n_nextn} layers" if facts.n_nextn else "no layer"
        raise NativeError(
            f"{facts.path}: the model has {found} for next-token prediction ({facts.arch}.nextn_predict_layers), "
            "and exactly one can be driven; choose another model or do not draft"
        )
    layer = facts.n_layer - 1
    names = {t.name for t in facts.dense}
    missing = [part for part in _ASSERTED if f"blk.{layer}.{part}.weight" not in names]
    if not missing and not any(bank.layer == layer for bank in facts.nextn_banks):
        missing = ["ffn_gate_exps"]
    if missing:
        raise NativeError(
            f"{facts.path}: the head for next-token prediction lacks blk.{layer}.{missing[0]}.weight; "
            "convert the model again with it (not every converted file has kept the head)"
        )


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
        self._extension = extension()
        self._llama = lib.llama()
        self._n_ubatch, self._length = options.ubatch, 0
        self._hidden: Rows = np.zeros(facts.n_embd, np.float32)
        options = replace(options, outputs=options.ubatch)
        self.model = Model(facts, keep_experts_out=False, load_mtp=True)
        self._contexts: list[Context] = []
        try:
            self._trunk = self._open(options)
            self._head = self._open(replace(options, ctx_type=_CTX_TYPE_MTP))
        except BaseException:
            self.close()
            raise
        # of the trunk the states of all rows; of the head those of outputs, which all its rows are
        self._extension.llama_set_embeddings_nextn(self._trunk.handle, True, False)
        self._extension.llama_set_embeddings_nextn(self._head.handle, True, True)

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
                said, states = self._decode(self._trunk, part, self._length, None)
                before = np.concatenate([self._hidden[None], states[:-1]])
                guessed, _ = self._decode(self._head, part, self._length, before)
            except BaseException:
                self._trunk.truncate(self._length)
                self._head.truncate(self._length)
                raise
            self._length += len(part)
            self._hidden = states[-1]
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
                rows, states = self._decode(self._head, [token], self._length + step, state[None])
                logits[step], state = rows[0], states[0]
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

    def _open(self, options: ContextOptions) -> Context:
        self._contexts.append(Context(self.model, options))
        return self._contexts[-1]

    def _decode(self, context: Context, tokens: Sequence[int], first: int, hidden: Rows | None) -> tuple[Rows, Rows]:
        """Logits and hidden states of all rows. ``hidden`` goes with tokens to the head and never to the trunk."""
        count = len(tokens)
        if not count or not context.handle:
            raise NativeError(f"{self.model.path}: nothing to decode, or this head is closed")
        # each must outlive the call: the batch only points to them
        ids, places = (ctypes.c_int32 * count)(*tokens), (ctypes.c_int32 * count)(*range(first, first + count))
        one, sequence = (ctypes.c_int32 * count)(*[1] * count), ctypes.c_int32(0)
        sequences = (ctypes.POINTER(ctypes.c_int32) * count)(*[ctypes.pointer(sequence)] * count)
        outputs = (ctypes.c_int8 * count)(*[1] * count)
        batch = self._llama.llama_batch()
        batch.n_tokens, batch.token, batch.pos = count, ids, places
        batch.n_seq_id, batch.seq_id, batch.logits = one, sequences, outputs
        shape = (count, self._hidden.size)
        rows = None if hidden is None else np.ascontiguousarray(hidden, np.float32)
        if rows is not None:
            if rows.shape != shape:
                raise NativeError(f"hidden states of the shape {rows.shape}, not {shape}")
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        code = self._llama.llama_decode(context.handle, batch)
        if code:
            reason = "no room in the KV cache; raise ctx" if code == 1 else f"llama_decode returned {code}"
            raise NativeError(f"{self.model.path}: {reason} (position {first})")
        logits = self._rows(self._llama.llama_get_logits(context.handle), (count, self.model.n_vocab), "logits")
        states = self._extension.llama_get_embeddings_nextn(context.handle)
        return logits, self._rows(states, shape, "hidden states")

    @staticmethod
    def _rows(pointer: Any, shape: tuple[int, int], what: str) -> Rows:
        if not pointer:
            raise NativeError(f"llama.cpp has no {what} for the last batch; install a tested llama-cpp-python")
        copied: Rows = np.ctypeslib.as_array(pointer, shape).copy()
        return copied
