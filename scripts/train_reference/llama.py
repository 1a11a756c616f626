"""llama.cpp on a file: logits and hidden states of the trunk, drafts of the MTP head, tokens of a text.

Float32 keys and values and no flash attention, so that numbers can be compared. The functions for the head are not
part of llama.cpp's stable interface.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


class Session:
    """One model with one context for the trunk and, with `mtp`, one for its head."""

    def __init__(self, path: Path, *, context: int = 512, threads: int = 1, mtp: bool = False) -> None:
        import llama_cpp

        self._keep = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._keep, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers, parameters.use_extra_bufts, parameters.load_mtp = 0, False, mtp
        self._model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise RuntimeError(f"{path}: llama.cpp cannot open it")
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.size: int = llama_cpp.llama_vocab_n_tokens(self._vocabulary)
        self.width: int = llama_cpp.llama_model_n_embd(self._model)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = context
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.no_perf = True
        self._trunk: Any = llama_cpp.llama_init_from_model(self._model, settings)
        self._head: Any = None
        if mtp:
            from llama_cpp import llama_cpp_ext

            settings.ctx_type = 1
            self._head = llama_cpp.llama_init_from_model(self._model, settings)
            llama_cpp_ext.llama_set_embeddings_nextn(self._trunk, True, False)
            llama_cpp_ext.llama_set_embeddings_nextn(self._head, True, True)

    def close(self) -> None:
        """Free contexts and model."""
        import llama_cpp

        for context in (self._head, self._trunk):
            if context:
                llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(self._model)

    def tokenise(self, text: str) -> list[int]:
        """Return the tokens of a text, special ones recognised, nothing added."""
        import llama_cpp

        data = text.encode()
        room = (llama_cpp.llama_token * (len(data) + 1))()
        n = llama_cpp.llama_tokenize(self._vocabulary, data, len(data), room, len(room), False, True)
        return list(room[:n])

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without the special ones."""
        import llama_cpp

        room = ctypes.create_string_buffer(256)
        parts = []
        for token in tokens:
            n = llama_cpp.llama_token_to_piece(self._vocabulary, token, room, len(room), 0, False)
            parts.append(room.raw[:n])
        return b"".join(parts).decode("utf-8", "replace")

    def clear(self) -> None:
        """Forget the keys and values of both contexts."""
        import llama_cpp

        for context in (self._head, self._trunk):
            if context:
                llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    def logits(self, tokens: Sequence[int], start: int = 0) -> Array:
        """Decode tokens at positions from `start`; return the logits after each, (n, size)."""
        return self._decode(self._trunk, tokens, start, None)

    def hidden(self, number: int) -> Array:
        """Return the trunk's hidden states of the last `number` tokens decoded, (number, width)."""
        from llama_cpp import llama_cpp_ext

        rows = np.ctypeslib.as_array(llama_cpp_ext.llama_get_embeddings_nextn(self._trunk), (number, self.width))
        return rows.copy()

    def draft(self, tokens: Sequence[int], hidden: Array, start: int = 0) -> tuple[Array, Array]:
        """Decode with the head tokens and the hidden states of the positions before; return logits and states."""
        from llama_cpp import llama_cpp_ext

        logits = self._decode(self._head, tokens, start, hidden)
        rows = [llama_cpp_ext.llama_get_embeddings_nextn_ith(self._head, i) for i in range(len(tokens))]
        return logits, np.stack([np.ctypeslib.as_array(r, (self.width,)).copy() for r in rows])

    def forget(self, trunk: int, head: int) -> None:
        """Drop the keys and values at positions from `trunk` and `head` on, each in its context."""
        import llama_cpp

        for context, start in ((self._head, head), (self._trunk, trunk)):
            if context:
                llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 0, start, -1)

    def _decode(self, context: Any, tokens: Sequence[int], start: int, hidden: Array | None) -> Array:
        import llama_cpp

        n = len(tokens)
        ids = (ctypes.c_int32 * n)(*tokens)
        places = (ctypes.c_int32 * n)(*range(start, start + n))
        counts = (ctypes.c_int32 * n)(*[1] * n)
        sequence = (ctypes.c_int32 * 1)(0)
        sequences = (ctypes.POINTER(ctypes.c_int32) * n)(*[ctypes.cast(sequence, ctypes.POINTER(ctypes.c_int32))] * n)
        wanted = (ctypes.c_int8 * n)(*[1] * n)
        batch = llama_cpp.llama_batch()
        batch.n_tokens, batch.token, batch.pos = n, ids, places
        batch.n_seq_id, batch.seq_id, batch.logits = counts, sequences, wanted
        if hidden is not None:
            rows = np.ascontiguousarray(hidden, np.float32)
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        done = llama_cpp.llama_decode(context, batch)
        if done:
            raise RuntimeError(f"llama_decode returned {done} at position {start}")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (n, self.size)).copy()
