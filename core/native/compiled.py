"""The compiled form of the eval hook, and the choice between the forms.

What runs is ``_seam.c``; here it gets its tables, and what it calls back reaches the handlers of :class:`Seam`.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from bmoe.contracts import BankFacts, ExpertKey
from bmoe.errors import NativeError
from bmoe.native import lib, tensor
from bmoe.native.evalhook import PythonSeam, Seam

_Advance = ctypes.CFUNCTYPE(ctypes.c_bool)
_Route = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64), ctypes.c_int32)
_NAME, _DATA, _NE, _NB, _SRC = (tensor.offset_of(field) for field in ("name", "data", "ne", "nb", "src"))
_LOG_RECORDS = 1 << 16


class _SeamState(ctypes.Structure):
    """``seam_state`` of ``_seam.c``, field by field."""

    _fields_ = [
        ("name_offset", ctypes.c_uint64),
        ("data_offset", ctypes.c_uint64),
        ("ne_offset", ctypes.c_uint64),
        ("nb_offset", ctypes.c_uint64),
        ("src_offset", ctypes.c_uint64),
        ("node", ctypes.c_void_p),
        ("awaited", ctypes.c_void_p),
        ("sought", ctypes.c_char_p),
        ("bank_of_layer", ctypes.c_void_p),
        ("second_of_bank", ctypes.c_void_p),
        ("key_base", ctypes.c_void_p),
        ("entry_base", ctypes.c_void_p),
        ("n_expert", ctypes.c_void_p),
        ("resident", ctypes.c_void_p),
        ("stamp", ctypes.c_void_p),
        ("log", ctypes.c_void_p),
        ("route", _Route),
        ("advance", _Advance),
        ("weigh", _Advance),
        ("log_length", ctypes.c_int64),
        ("log_capacity", ctypes.c_int64),
        ("asks", ctypes.c_int64),
        ("routings", ctypes.c_int64),
        ("entered", ctypes.c_int64),
        ("n_layer", ctypes.c_int32),
        ("pending", ctypes.c_int32),
        ("generation", ctypes.c_uint32),
        ("attentive", ctypes.c_int32),
        ("cut", ctypes.c_int32),
        ("latch", ctypes.c_int32),
    ]


class CSeam(Seam):
    """The compiled form: about 0.1 ms of asks per token; enters Python only when a routing has a miss."""

    name = "c"

    def __init__(self, banks: Sequence[BankFacts]) -> None:
        super().__init__(banks)
        self._library = ctypes.CDLL(importlib.import_module("bmoe.native._seam").__file__)
        n_layer = max((b.layer for b in banks), default=-1) + 1
        bank_of_layer = (ctypes.c_int32 * n_layer)(*[-1] * n_layer)
        for index, bank in enumerate(banks):
            if bank.bank == 0:
                bank_of_layer[bank.layer] = index
        n = len(banks)
        self._log = (ctypes.c_int64 * (_LOG_RECORDS + sum(b.n_expert for b in banks)))()
        self._keep: dict[str, Any] = {
            "bank_of_layer": bank_of_layer,
            "second_of_bank": (ctypes.c_int32 * n)(*self.second_of_bank),
            "key_base": (ctypes.c_int64 * n)(*self.key_base),
            "entry_base": (ctypes.c_int64 * n)(*self.entry_base),
            "n_expert": (ctypes.c_int32 * n)(*[b.n_expert for b in banks]),
            "resident": (ctypes.c_uint8 * len(self.resident)).from_buffer(self.resident),
            "stamp": (ctypes.c_uint32 * len(self.resident))(),
            "log": self._log,
        }
        self._state = state = _SeamState(_NAME, _DATA, _NE, _NB, _SRC)
        for field, array in self._keep.items():
            setattr(state, field, ctypes.addressof(array))
        state.route, state.advance = _Route(self._route), _Advance(self._advanced)
        state.weigh = _Advance(self._weighed)
        state.log_capacity, state.n_layer, state.pending = len(self._log), n_layer, -1

    def install(self, params: Any) -> None:  # noqa: D102 - see Seam
        binding = lib.llama()
        user = ctypes.addressof(self._state)
        if self.banks:
            params.cb_eval = ctypes.cast(self._library.seam_eval, binding.ggml_backend_sched_eval_callback)
            params.cb_eval_user_data = user
        params.abort_callback = ctypes.cast(self._library.seam_abort, binding.ggml_abort_callback)
        params.abort_callback_data = user

    def drain(self) -> list[list[ExpertKey]]:  # noqa: D102 - see Seam
        if self._state.log_length:
            log, at = self._log[: self._state.log_length], 0
            self._state.log_length = 0
            touched = self._touched
            while at < len(log):
                end = at + 1 + log[at]
                touched.append(log[at + 1 : end])
                at = end
        return super().drain()

    def begin(self, *, cut: bool = False) -> None:  # noqa: D102 - see Seam
        super().begin(cut=cut)
        self._completed = self._state.entered
        self._state.pending, self._state.awaited, self._state.sought = -1, None, None
        self._state.attentive, self._state.cut = int(self.attentive), int(cut)

    def finish(self) -> None:  # noqa: D102 - see Seam
        super().finish()
        if self._state.entered != self._completed:
            # a signal handler raised in the callback before its first statement; ctypes could only print that
            raise KeyboardInterrupt

    @property
    def stopped(self) -> bool:  # noqa: D102 - see Seam
        return bool(self._state.latch)

    def _latch(self, on: bool) -> None:
        self._state.latch = int(on)

    def isolate(self, weight: int) -> None:  # noqa: D102 - see Seam
        self._state.awaited = weight or None

    def seek(self, name: bytes) -> None:  # noqa: D102 - see Seam
        self._state.sought = name

    def _weighed(self) -> bool:
        self.node = self._state.node or 0
        return self._called(self.weigh)

    def _advanced(self) -> bool:
        return self._called(self.advance)

    def _called(self, what: Callable[[], None]) -> bool:
        try:
            what()
            self._completed += 1
            return True
        except BaseException as error:  # noqa: BLE001 - nothing may cross C
            self._completed += 1
            self.fail(error)
            return False

    def _route(self, bank: int, count: int, keys: Any, invalid: int) -> bool:
        try:
            if bank < 0:
                self._touched = self.drain()
                return True
            self.node = self._state.node or 0
            self._enter(bank, keys[:count], invalid)
            self._completed += 1
            return True
        except BaseException as error:  # noqa: BLE001 - nothing may cross C
            self._completed += 1
            self.fail(error)
            return False


def compiled_seam_missing() -> str:
    """Why the compiled seam cannot be used, or ""."""
    try:
        importlib.import_module("bmoe.native._seam")
    except ImportError as error:
        return f"_seam is not compiled ({error})"
    return ""


def make_seam(kind: str, banks: Sequence[BankFacts]) -> Seam:
    """The seam named ``c`` or ``python``; ``auto`` is the compiled one where there is one."""
    if kind == "auto":
        kind = "python" if compiled_seam_missing() else "c"
    if kind == "c" and (missing := compiled_seam_missing()):
        raise NativeError(f"{missing}; install a C compiler and reinstall bmoe, or use the Python seam")
    return CSeam(banks) if kind == "c" else PythonSeam(banks)
