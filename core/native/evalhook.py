"""The eval hook: isolates each routing node and hands its experts over before that layer's expert matmuls run.

Contract relied on (``ggml_backend_sched_compute_splits`` in ggml/src/ggml-backend.cpp): every node is asked about
before its group is computed; answering True closes the group at that node, which is then computed and announced with
``ask=False`` before anything after it runs. Not a documented guarantee: the identity gates would catch its loss.

Two forms behind one interface, held equal by tests: ``CSeam`` of :mod:`bmoe.native.compiled` filters, gathers and
checks residency in ``_seam.c``; :class:`PythonSeam` does the same in Python. No exception crosses C: it is stashed, a
latch is set that ``abort_callback`` reads, and :meth:`Seam.finish` raises it after the decode.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from bmoe.contracts import BankFacts, ExpertKey, expert_key
from bmoe.errors import NativeError
from bmoe.native import lib, tensor

RouteHandler = Callable[[int, list[ExpertKey]], None]
"""Called with a bank's index and its distinct keys, in the order of their last use, if any of them is not resident.

And for every routing while the seam is attentive."""

_PREFIX = b"ffn_moe_topk-"
_SECOND = b" (copy)"
"""A second bank's ids are a cast of the first's, and the cast of a node without a name has this one."""
_NAME, _SRC = tensor.offset_of("name"), tensor.offset_of("src")


def _unhandled(bank: int, keys: list[ExpertKey]) -> None:
    raise NativeError("a routing arrived before anything was bound to handle it")


def _unasked() -> None:
    raise NativeError("a product was awaited that nobody handles")


class Seam(ABC):
    """What both forms share: the residency flags, the touch log, the latch and the stashed failure.

    ``resident`` has one byte per entry, bank after bank (``entry_base[bank] + expert``); the store writes it.
    ``handler`` and ``advance`` are set by the stream; while :attr:`attentive`, the handler is called for routings that
    are all hits too. ``node`` is the address of the routing's tensor while the handler runs. Without banks it isolates
    nothing and serves to stop a decode. While :attr:`cut`, a graph ends at its first routing, which nobody hears of:
    llama_decode returns 0, and what attention has put into the KV by then is whole.
    """

    name = ""

    def __init__(self, banks: Sequence[BankFacts]) -> None:
        self.banks = banks
        self.handler: RouteHandler = _unhandled
        self.advance: Callable[[], None] = _unasked
        self.weigh: Callable[[], None] = _unasked
        self.key_base = [expert_key(b.layer, 0, b.bank) for b in banks]
        self.entry_base: list[int] = []
        total = 0
        for bank in banks:
            self.entry_base.append(total)
            total += bank.n_expert
        self.resident = bytearray(total)
        second = {b.layer: i for i, b in enumerate(banks) if b.bank == 1}
        self.second_of_bank = [second.get(b.layer, -1) if b.bank == 0 else -1 for b in banks]
        self.failure: BaseException | None = None
        self.attentive = self.cut = False
        self.node = 0
        self._touched: list[list[ExpertKey]] = []
        self._completed = 0

    def drain(self) -> list[list[ExpertKey]]:
        """The keys of every routing since the last call that was all hits, in order, one list per routing."""
        touched, self._touched = self._touched, []
        return touched

    def fail(self, error: BaseException) -> None:
        """Stash the first failure and set the latch: the decode in progress ends at the next node."""
        if self.failure is None:
            self.failure = error
        self.stop()

    def begin(self, *, cut: bool = False) -> None:
        """Before a decode, which is to be :attr:`cut` or not: forget an earlier failure."""
        self.failure, self.cut = None, cut
        self._latch(False)

    def finish(self) -> None:
        """After a decode: raise what a callback stashed, as itself."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def stop(self) -> None:
        """Set the latch, from any thread: the decode in progress ends at its next node and returns 2."""
        self._latch(True)

    @abstractmethod
    def isolate(self, weight: int) -> None:
        """Call ``advance`` once the node that multiplies by this tensor (its address) was computed; 0 = none.

        All nodes of a group are asked about before any of it is computed, so the node is closed off: what it is
        computed from is needed by then, what comes after it is not.
        """

    @abstractmethod
    def seek(self, name: bytes) -> None:
        """Isolate the next node of this name and call ``weigh`` once it is computed; :attr:`node` is its address then.

        Before the products of the routing that is being handled; a node that never comes is the caller's matter.
        """

    @property
    @abstractmethod
    def stopped(self) -> bool:
        """Whether the latch was set since the last :meth:`begin`."""

    @abstractmethod
    def install(self, params: Any) -> None:
        """Set cb_eval and abort_callback in ``llama_context_params``; this object must outlive the context."""

    @abstractmethod
    def _latch(self, on: bool) -> None: ...

    def _enter(self, bank: int, keys: list[ExpertKey], invalid: int) -> None:
        if invalid >= 0:
            facts = self.banks[bank]
            raise NativeError(
                f"layer {facts.layer} routed to expert {invalid if invalid < 2**31 - 1 else 'below 0'} of "
                f"{facts.n_expert}; the model file is damaged or its routing has another layout"
            )
        self.handler(bank, keys)


class PythonSeam(Seam):
    """The portable form: correct everywhere, a few milliseconds of asks per token slower."""

    name = "python"

    def __init__(self, banks: Sequence[BankFacts]) -> None:
        super().__init__(banks)
        self._stop = False
        self._pending = -1
        self._awaited = 0
        self._sought = b""
        self._unraisable_before: Any = None
        self._bank_of = {_PREFIX + str(b.layer).encode(): i for i, b in enumerate(banks) if b.bank == 0}
        # objects, not functions: ctypes frees a callback that nothing references
        self._eval_callback = lib.EvalCallback(self._eval)
        self._abort_callback = lib.AbortCallback(lambda user: self._stop)

    def install(self, params: Any) -> None:  # noqa: D102 - see Seam
        binding = lib.llama()
        if self.banks:
            params.cb_eval = ctypes.cast(self._eval_callback, binding.ggml_backend_sched_eval_callback)
        params.abort_callback = ctypes.cast(self._abort_callback, binding.ggml_abort_callback)

    def begin(self, *, cut: bool = False) -> None:  # noqa: D102 - see Seam
        super().begin(cut=cut)
        self._pending, self._awaited, self._sought = -1, 0, b""
        # A signal handler that raises before a callback's first statement reaches only this hook of Python's, and C
        # goes on with an answer that nobody gave. Signals arrive on the main thread alone.
        if self._unraisable_before is None and threading.current_thread() is threading.main_thread():
            self._unraisable_before, sys.unraisablehook = sys.unraisablehook, self._unraisable

    def finish(self) -> None:  # noqa: D102 - see Seam
        if self._unraisable_before is not None:
            sys.unraisablehook, self._unraisable_before = self._unraisable_before, None
        super().finish()

    def _unraisable(self, report: Any) -> None:
        if report.exc_value is not None and "ctypes callback" in (report.err_msg or ""):
            self.fail(report.exc_value)
        else:
            self._unraisable_before(report)

    @property
    def stopped(self) -> bool:  # noqa: D102 - see Seam
        return self._stop

    def _latch(self, on: bool) -> None:
        self._stop = on

    def isolate(self, weight: int) -> None:  # noqa: D102 - see Seam
        self._awaited = weight

    def seek(self, name: bytes) -> None:  # noqa: D102 - see Seam
        self._sought = name

    def _eval(
        self,
        address: int,
        ask: bool,
        user: int | None,
        _u64: Any = ctypes.c_uint64.from_address,
        _moe: int = int.from_bytes(_PREFIX[:8], "little"),
        _big: int = int.from_bytes(_PREFIX[:8], "big"),
    ) -> bool:
        try:
            if self._awaited and not self._stop and _u64(address + _SRC).value == self._awaited:
                if not ask:
                    self._awaited = 0
                    self.advance()
                return True
            head = _u64(address + _NAME).value
            if self._stop or (head != _moe and head != _big and self._pending < 0):
                return False
            name = ctypes.string_at(address + _NAME)
            if name == self._sought:
                if not ask:
                    self._sought, self.node = b"", address
                    self.weigh()
                return True
            bank = self._pending if name == _SECOND else self._bank_of.get(name, -1)
            if bank < 0:
                return False
            second = self.second_of_bank[bank]
            if 0 <= second == self._pending:
                return False  # the same choice, computed again for the second bank
            if not ask:
                if self.cut:
                    return False
                self._pending, self.node = second, address
                self._routing(tensor.at(address), bank)
            return True
        except BaseException as error:  # noqa: BLE001 - nothing may cross C
            self.fail(error)
            return False

    def _routing(self, node: tensor.GgmlTensor, bank: int) -> None:
        slots, tokens = node.ne[0], node.ne[1]
        step, row, base = node.nb[0], node.nb[1], node.data or 0
        last_use: dict[int, None] = {}
        for token in range(tokens - 1, -1, -1):
            span = (ctypes.c_int32 * ((slots - 1) * (step // 4) + 1)).from_address(base + token * row)
            for expert in reversed(span[:: step // 4]):
                last_use.setdefault(expert)
        n_expert, entry, key = self.banks[bank].n_expert, self.entry_base[bank], self.key_base[bank]
        invalid = next((e if e >= 0 else 2**31 - 1 for e in last_use if not 0 <= e < n_expert), -1)
        keys = [key + e for e in reversed(last_use)]
        if invalid < 0 and not self.attentive and all(self.resident[entry + e] for e in last_use):
            self._touched.append(keys)
            return
        self._enter(bank, keys, invalid)
