"""How far back a context can go whose layers keep one state for the whole text, where others keep a row for each token.

llama.cpp can keep a copy of the states for each token of a decode (``n_rs_seq`` of them, for some architectures). It
goes back to any copy without a word, also to one that the last decode did not write, or wrote half of; so this counts.
What was marked can be gone back to from anywhere, on every architecture.
"""

from __future__ import annotations

import ctypes
from typing import Any

from bmoe.errors import NativeError
from bmoe.native import lib

_STATES_ALONE = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class States:
    """The states of one context, whose sequence 0 is the text. Positions are counts of tokens."""

    def __init__(self, handle: Any) -> None:
        """``handle`` is the ``llama_context *``."""
        self._llama = lib.llama()
        self._handle = handle
        self._copies = int(self._llama.llama_n_rs_seq(handle))
        self._reach = 0
        self._spoilt = False
        self._cut: int | None = None
        self._marked: int | None = None
        self._bytes: Any = None

    def goes_back(self, count: int) -> bool:
        """Whether after a decode of ``count`` tokens there will be copies to go back to behind its first one."""
        return count - 1 <= self._copies

    def begin(self) -> None:
        """A decode begins: go back where :meth:`cut` said, which llama.cpp can do once between two decodes."""
        if self._cut is not None and not self._llama.llama_memory_seq_rm(self._memory, 0, self._cut, -1):
            raise NativeError(f"llama.cpp does not go back to token {self._cut}, for which it keeps a state")
        self._cut = None

    def ended(self, count: int, code: int) -> None:
        """A decode of ``count`` tokens ended with this code of llama_decode."""
        self._spoilt = self._spoilt or code != 0
        self._reach = min(count - 1, self._copies)

    def cut(self, position: int) -> bool:
        """Drop every token at or after ``position``; False if no state is left of the text up to there."""
        end = self._end()
        if position <= 0:
            self._llama.llama_memory_seq_rm(self._memory, 0, 0, -1)
            self.cleared()
            return True
        if self._spoilt or end - position > self._reach:
            return False
        if position < end:
            self._cut = position if self._cut is None else min(self._cut, position)
        if self._marked is not None and position < self._marked:
            self._marked = None
        return True

    def mark(self) -> None:
        """Keep the states as they are, in place of those that were kept before. Costs a copy of them."""
        self.begin()
        end = self._end()
        if self._marked == end or self._spoilt:
            return
        nbytes = self._llama.llama_state_seq_get_size_ext(self._handle, 0, _STATES_ALONE)
        if self._bytes is None or len(self._bytes) != nbytes:
            self._bytes = (ctypes.c_uint8 * nbytes)()
        self._llama.llama_state_seq_get_data_ext(self._handle, self._bytes, nbytes, 0, _STATES_ALONE)
        self._marked = end

    def go_back(self, position: int) -> int:
        """Go back to the mark, if it is not after ``position``, or else empty the context; the tokens then held."""
        marked = self._marked
        if marked is None or marked > position or not self._restored(marked):
            self._llama.llama_memory_clear(self._memory, True)
            self.cleared()
            return 0
        self._reach, self._spoilt, self._cut = 0, False, None
        return marked

    def cleared(self) -> None:
        """The context was emptied."""
        self._reach, self._spoilt, self._cut, self._marked = 0, False, None, None

    @property
    def _memory(self) -> Any:
        return self._llama.llama_get_memory(self._handle)

    def _end(self) -> int:
        return int(self._llama.llama_memory_seq_pos_max(self._memory, 0)) + 1

    def _restored(self, marked: int) -> bool:
        read = self._llama.llama_state_seq_set_data_ext(self._handle, self._bytes, len(self._bytes), 0, _STATES_ALONE)
        return bool(read) and bool(self._llama.llama_memory_seq_rm(self._memory, 0, marked, -1))
