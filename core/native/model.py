"""Model and context of llama.cpp, each with the parameters that streaming needs and the high-level binding hides."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bmoe.contracts import ModelFacts
from bmoe.errors import ModelError, NativeError
from bmoe.native import interrupts, lib, llamalog
from bmoe.native.batch import Batch
from bmoe.native.carve import Carver
from bmoe.native.states import States

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LOAD_MMAP = 1
_FLASH = {"auto": -1, False: 0, True: 1}
_KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
_KV_TAG_INT, _KV_TAG_FLOAT, _KV_TAG_BOOL, _KV_TAG_STR = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class OpenReport:
    """What an open cost: seconds, bytes read from storage (None = unmeasured), and expert bytes kept out of reach."""

    seconds: float
    read_bytes: int | None
    forbidden_bytes: int


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """Parameters of a context.

    ``threads`` serve single tokens and prompts alike; ``outputs`` is the most logits rows of one decode. For drafting:
    ``ctx_type``, ``rollback`` (how many tokens a recurrent state can go back), and ``sequences``, the most paths of a
    candidate tree.
    """

    ctx: int = 2048
    ubatch: int = 512
    threads: int = 1
    kv_type: str = "f16"
    flash_attention: str | bool = "auto"
    outputs: int = 1
    ctx_type: int = 0
    rollback: int = 0
    sequences: int = 1


class _BufferOverride(ctypes.Structure):
    """``struct llama_model_tensor_buft_override``, which the binding leaves out."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


class Model:
    """An opened model: weights and vocabulary. Close it after every context on it."""

    def __init__(
        self,
        facts: ModelFacts,
        *,
        keep_experts_out: bool,
        read_dense: bool = True,
        repack: bool = False,
        load_mtp: bool = False,
        kv_overrides: Mapping[str, int | float | bool | str] | None = None,
        buffer_overrides: Sequence[tuple[str, int]] = (),
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open ``facts.path``; raises ModelError with llama.cpp's own last error if it refuses the file.

        ``keep_experts_out`` leaves routed experts unread and unreachable: bind every expert tensor before a decode.
        Without ``read_dense`` it leaves all other weights unread too, until they are used.
        ``repack`` lets llama.cpp rearrange weights for speed, which changes last bits and cannot be streamed.
        ``kv_overrides`` replaces metadata, by gguf key; ``buffer_overrides`` gives tensors whose name matches a regular
        expression another ``ggml_backend_buffer_type_t``, by address. The load ends early, as refused, once
        ``cancelled`` says True.
        """
        self.path, self.has_head = facts.path, load_mtp
        self._llama = llama = lib.llama()
        llamalog.start()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = _LOAD_MMAP
        params.use_extra_bufts = repack
        params.load_mtp = load_mtp
        overrides = _kv_overrides(llama, kv_overrides or {})
        params.kv_overrides = overrides
        placed = _buffer_overrides(buffer_overrides)
        params.tensor_buft_overrides = ctypes.addressof(placed) if buffer_overrides else None
        before, started = _read_bytes(), time.perf_counter()
        with llamalog.recent_errors() as errors, contextlib.ExitStack() as stack:
            carver = stack.enter_context(Carver(facts, read_dense=read_dense)) if keep_experts_out else None

            def progress(done: float, user: int | None) -> bool:
                return (carver is None or carver.progress()) and not cancelled()

            params.progress_callback = llama.llama_progress_callback(progress)
            self._handle = llama.llama_model_load_from_file(os.fsencode(facts.path), params)
            if not self._handle:
                reason = llamalog.reason(errors)
                raise ModelError(f"{facts.path}: llama.cpp cannot load this model: {reason}")
            try:
                if carver is not None:
                    carver.finish()
            except BaseException:
                self.close()
                raise
        self._read_before = before
        self.report = OpenReport(time.perf_counter() - started, None, carver.forbidden if carver is not None else 0)
        self.count_reads()
        self.bases: dict[int, int] = carver.bases if carver is not None else {}
        self._vocab = llama.llama_model_get_vocab(self._handle)
        self.n_vocab = int(llama.llama_vocab_n_tokens(self._vocab))
        self.n_embd = int(llama.llama_model_n_embd(self._handle))

    def count_reads(self) -> None:
        """Report everything that was read since the load began, for weights that are read after it."""
        before, after = self._read_before, _read_bytes()
        read = None if before is None or after is None else after - before
        self.report = dataclasses.replace(self.report, read_bytes=read)

    @property
    def handle(self) -> Any:
        """The ``llama_model *``; NativeError if it was freed."""
        if not self._handle:
            raise NativeError(f"{self.path}: this model is closed; open it again")
        return self._handle

    @property
    def is_open(self) -> bool:
        """Whether it was not freed yet."""
        return bool(self._handle)

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of ``text``, with the beginning-of-sequence token if the model wants one."""
        data = text.encode(errors="replace")  # half a surrogate pair is no character
        room = len(data) + 8
        _ = self.handle  # refuses a closed model, whose vocabulary is gone too
        while True:
            tokens = (ctypes.c_int32 * room)()
            count = self._llama.llama_tokenize(self._vocab, data, len(data), tokens, room, True, special)
            if count >= 0:
                return list(tokens[:count])
            room = -count

    @property
    def has_states(self) -> bool:
        """Whether it keeps a state that each token changes, so that it cannot go back at will."""
        return bool(self._llama.llama_model_is_recurrent(self.handle) or self._llama.llama_model_is_hybrid(self.handle))

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token, which may be part of a character; control tokens are empty, unless ``special``."""
        room = 64
        while True:
            data = ctypes.create_string_buffer(room)
            count = self._llama.llama_token_to_piece(self._vocab, token, data, room, 0, special)
            if count >= 0:
                return data.raw[:count]
            room = -count

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return bool(self._llama.llama_vocab_is_eog(self._vocab, token))

    def close(self) -> None:
        """Free the model. May be called twice."""
        if self._handle:
            self._llama.llama_model_free(self._handle)
            self._handle = None


class Context:
    """A KV and a graph over a model. ``callbacks`` are (cb_eval, abort_callback) or a seam that installs its own.

    ``buffers``: bytes by kind (compute, output, KV, RS) as llama.cpp's log says; empty if it does not. ``decoded``: the
    tokens of the last decode, 0 if it failed.
    """

    def __init__(self, model: Model, options: ContextOptions, *, callbacks: Any = None) -> None:
        """Create it; raises NativeError with llama.cpp's last error, mostly memory for the KV or compute buffers."""
        self._llama = llama = lib.llama()
        self.model = model
        self.options = options
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = options.ctx, options.ubatch, options.ubatch
        # a model that denoises has no KV and outputs every token; with fewer rows than that llama.cpp ends the process
        denoises = llama.llama_model_is_diffusion(model.handle)
        params.n_outputs_max = options.ubatch if denoises else min(options.outputs, options.ubatch)
        params.n_threads = params.n_threads_batch = options.threads
        params.flash_attn_type = _FLASH[options.flash_attention]
        params.type_k = params.type_v = _KV_TYPES[options.kv_type]
        params.ctx_type, params.n_rs_seq = options.ctx_type, options.rollback
        # paths of a tree share the cells of what they have in common
        params.n_seq_max, params.kv_unified = options.sequences, options.sequences > 1
        params.no_perf = True
        self._callbacks = callbacks
        if isinstance(callbacks, tuple):
            params.cb_eval = ctypes.cast(callbacks[0], llama.ggml_backend_sched_eval_callback)
            params.abort_callback = ctypes.cast(callbacks[1], llama.ggml_abort_callback)
        elif callbacks is not None:
            callbacks.install(params)
        self._handle = None
        try:
            with llamalog.recent_errors() as errors, llamalog.recent_buffers() as buffers, interrupts.deferred():
                self._handle = llama.llama_init_from_model(model.handle, params)
                self.buffers: dict[str, int] = dict(buffers)
        except BaseException:
            self.close()
            raise
        if not self._handle:
            reason = llamalog.reason(errors)
            raise NativeError(
                f"llama.cpp cannot create a context of {options.ctx} tokens: {reason}; lower model.ctx or model.ubatch"
            )
        self._batch = Batch(options.ubatch)
        self.decoded = 0
        # a head for next-token prediction has none, whatever its model has
        self._states = States(self._handle) if model.has_states and options.ctx_type == 0 else None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def handle(self) -> Any:
        """The ``llama_context *``."""
        return self._handle

    def decode(self, tokens: Sequence[int]) -> int:
        """Decode up to ``ubatch`` tokens after those in the KV, with logits for the last; llama_decode's code."""
        return self._decode(self._batch.continuing(tokens))

    def decode_at(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[tuple[int, ...]] = (),
        *,
        outputs: bool = True,
        hidden: NDArray[np.float32] | None = None,
    ) -> int:
        """Decode up to ``ubatch`` tokens at these positions, with logits for each or none; llama_decode's code.

        ``sequences`` and ``hidden`` as in :meth:`Batch.placed <bmoe.native.batch.Batch.placed>`.
        """
        return self._decode(self._batch.placed(tokens, positions, sequences, outputs=outputs, hidden=hidden))

    def _decode(self, batch: Any) -> int:
        if not self._handle:
            raise NativeError(f"{self.model.path}: this conversation is closed; open another one")
        self.decoded = 0
        if self._states is not None:
            self._states.begin()
        code = int(self._llama.llama_decode(self._handle, batch))
        if self._states is not None:
            self._states.ended(batch.n_tokens, code)
        self.decoded = batch.n_tokens if code == 0 else 0
        return code

    def logits(self, row: int = -1) -> Any:
        """One token's logits as a float32 array [n_vocab]; llama.cpp's memory, valid until the next decode.

        ``row`` is the token's place in the last batch; -1 = the last output.
        """
        import numpy as np

        pointer = self._llama.llama_get_logits_ith(self._handle, row)
        if not pointer:
            raise NativeError(f"llama.cpp has no logits for token {row} of the last batch")
        return np.ctypeslib.as_array(pointer, (self.model.n_vocab,))

    def branch(self, paths: int) -> None:
        """Let sequences 1 up to ``paths`` share what sequence 0 holds, so that paths of a tree can go on from it."""
        memory = self._llama.llama_get_memory(self._handle)
        for sequence in range(1, paths):
            self._llama.llama_memory_seq_cp(memory, 0, sequence, -1, -1)

    def take(self, path: int, position: int) -> bool:
        """Of all paths keep this one up to ``position``, as sequence 0; False if this memory cannot be cut.

        States go back within the last decode at most, to behind its first token; a failed one leaves none.
        """
        if not self._handle:
            return True
        if self._states is not None:
            return self._states.cut(position)  # with them there is one path
        memory = self._llama.llama_get_memory(self._handle)
        if not self._llama.llama_memory_seq_rm(memory, path, position, -1):
            return False
        if path:
            self._llama.llama_memory_seq_keep(memory, path)
            self._llama.llama_memory_seq_cp(memory, path, 0, -1, -1)
        self._llama.llama_memory_seq_keep(memory, 0)
        return True

    def truncate(self, position: int) -> bool:
        """Drop everything at or after ``position`` from the KV; False if this memory cannot."""
        return self.take(0, position)

    def mark(self, ahead: int | None = None) -> None:
        """States only: keep them as they are now, to go back to; not if the next decode, of ``ahead`` tokens, will."""
        if self._handle and self._states is not None and (ahead is None or not self._states.goes_back(ahead)):
            self._states.mark()

    def go_back(self, position: int) -> int:
        """Where :meth:`truncate` cannot: drop what follows the mark, or all if that is after ``position``.

        How many tokens are held then; those up to ``position`` have to be decoded again.
        """
        if self._handle and self._states is not None:
            return self._states.go_back(position)
        self.clear()
        return 0

    def clear(self) -> None:
        """Empty the KV."""
        if self._handle:
            self._llama.llama_memory_clear(self._llama.llama_get_memory(self._handle), True)
            if self._states is not None:
                self._states.cleared()

    def close(self) -> None:
        """Free the context. May be called twice."""
        if self._handle:
            self._llama.llama_free(self._handle)
            self._handle = None


def _kv_overrides(llama: Any, overrides: Mapping[str, int | float | bool | str]) -> Any:
    array = (llama.llama_model_kv_override * (len(overrides) + 1))()
    for slot, (key, value) in zip(array, overrides.items(), strict=False):
        slot.key = key.encode()
        if isinstance(value, bool):
            slot.tag, slot.value.val_bool = _KV_TAG_BOOL, value
        elif isinstance(value, int):
            slot.tag, slot.value.val_i64 = _KV_TAG_INT, value
        elif isinstance(value, float):
            slot.tag, slot.value.val_f64 = _KV_TAG_FLOAT, value
        else:
            slot.tag, slot.value.val_str = _KV_TAG_STR, value.encode()
    return array


def _buffer_overrides(overrides: Sequence[tuple[str, int]]) -> Any:
    array = (_BufferOverride * (len(overrides) + 1))()
    for slot, (pattern, buffer_type) in zip(array, overrides, strict=False):
        slot.pattern, slot.buft = pattern.encode(), buffer_type
    return array


def _read_bytes() -> int | None:
    try:
        with open("/proc/self/io", "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(b"read_bytes")), None)
    except OSError:
        return None
