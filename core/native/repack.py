"""Which weights llama.cpp can rearrange for this processor, and how it is told to do so while it loads.

ggml itself is asked, with the operation that the weight takes part in: no list of types, shapes or features to go
stale. A weight that its kernels do not take ends the process while it is loaded, so nothing else may be named.
Public to dense plugins.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from bmoe.errors import NativeError
from bmoe.native import lib, tensor

_BUFFER = b"CPU_REPACK"
_PTR = ctypes.c_void_p
_TYPE_COUNT = 43  # GGML_TYPE_COUNT, ggml/include/ggml.h; ggml reads past its table for a higher number


@functools.cache
def libraries() -> tuple[Any, Any]:
    """libggml-base, and libggml-cpu as llama.cpp mapped it."""
    base = lib.ggml()
    copies = lib.mapped_copies("libggml-cpu", Path("/proc/self/maps").read_text())
    if len(copies) != 1:
        raise NativeError(f"expected one mapped libggml-cpu, found {copies or 'none'}; reinstall llama-cpp-python")
    cpu = ctypes.CDLL(copies[0])
    for library, name, result, arguments in (
        (cpu, "ggml_backend_cpu_reg", _PTR, []),
        (base, "ggml_backend_reg_dev_get", _PTR, [_PTR, ctypes.c_size_t]),
        (base, "ggml_backend_reg_get_proc_address", _PTR, [_PTR, ctypes.c_char_p]),
        (base, "ggml_backend_buft_name", ctypes.c_char_p, [_PTR]),
        (base, "ggml_backend_buft_alloc_buffer", _PTR, [_PTR, ctypes.c_size_t]),
        (base, "ggml_backend_buffer_free", None, [_PTR]),
        (base, "ggml_backend_dev_supports_op", ctypes.c_bool, [_PTR, _PTR]),
        (base, "ggml_mul_mat", _PTR, [_PTR, _PTR, _PTR]),
        (base, "ggml_blck_size", ctypes.c_int64, [ctypes.c_int]),
    ):
        function = getattr(library, name, None)
        if function is None:
            raise NativeError(f"this llama-cpp-python has no {name}; install a tested version")
        function.restype, function.argtypes = result, arguments
    return base, cpu


@functools.cache
def _device() -> tuple[int, int]:
    """The processor's device and its buffer type of rearranged weights, 0 if this build has none."""
    base, cpu = libraries()
    registry = cpu.ggml_backend_cpu_reg()
    device = base.ggml_backend_reg_dev_get(registry, 0)
    address = base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return device, 0
    buffers = ctypes.CFUNCTYPE(ctypes.POINTER(_PTR), _PTR)(address)(device)
    index = 0
    while buffers and buffers[index]:
        if base.ggml_backend_buft_name(buffers[index]) == _BUFFER:
            return device, int(buffers[index] or 0)
        index += 1
    return device, 0


@functools.cache
def type_codes() -> dict[str, int]:
    """Types by the names that gguf gives them, as far as this ggml knows them."""
    from gguf import GGMLQuantizationType

    return {kind.name: int(kind) for kind in GGMLQuantizationType if kind < _TYPE_COUNT}


@functools.cache
def supported(type_name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight of this type and shape, fastest axis first, is multiplied faster when it is rearranged."""
    base, _ = libraries()
    device, buffer_type = _device()
    code = type_codes().get(type_name)
    plain = len(shape) == 2 and shape[1] > 1  # what ggml counts as two axes
    if not buffer_type or code is None or not plain or shape[0] % base.ggml_blck_size(code):
        return False
    context = base.ggml_init(lib.InitParams(1 << 16, None, True))
    buffer = base.ggml_backend_buft_alloc_buffer(buffer_type, 64)
    if not context or not buffer:
        raise NativeError("ggml refused 64 KiB; the system is out of memory")
    try:
        weights = base.ggml_new_tensor_2d(context, code, *shape)
        inputs = base.ggml_new_tensor_2d(context, tensor.TYPE_F32, shape[0], 1)
        tensor.at(weights).buffer = buffer
        return bool(base.ggml_backend_dev_supports_op(device, base.ggml_mul_mat(context, weights, inputs)))
    finally:
        base.ggml_backend_buffer_free(buffer)
        base.ggml_free(context)


def overrides(names: Collection[str]) -> Sequence[tuple[str, int]]:
    """For ``Model(buffer_overrides=…)``: patterns that match exactly ``names``, each with the buffer type.

    Layers share one pattern per kind of weight, since llama.cpp compiles every pattern anew for every tensor.
    """
    layers: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        found = re.fullmatch(r"(blk\.)(\d+)(\.[\w.]+)", name)
        if found:
            layers.setdefault((found[1], found[3]), []).append(found[2])
        elif re.fullmatch(r"[\w.]+", name):
            layers.setdefault((name, ""), [])
    _, buffer_type = _device()
    patterns = []
    for (head, tail), numbers in layers.items():
        middle = f"({'|'.join(numbers)})" if numbers else ""
        patterns.append((f"^{_literal(head)}{middle}{_literal(tail)}$", buffer_type))
    return patterns


def _literal(text: str) -> str:
    return text.replace(".", r"\.")
