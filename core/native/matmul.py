"""How fast this processor multiplies a vector by weights of one type: measured with ggml's own kernels.

No model is needed. The weights are bytes that mean nothing.
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import Any

from bmoe.errors import NativeError
from bmoe.native import lib, memory, repack, tensor

WEIGHTS = 64 << 20
"""Bytes that are enough for no processor's cache to hold them all."""
_SLACK = 32 << 20  # tensors, graph and the work buffer that ggml takes from the same memory, anew for each time
_MOST_NODES, _OVERHEAD = 1024, 1024
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 64
_NO_WEIGHTS = {"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"}  # ggml ends the process on their product
_PATTERN = 0x11  # as f16, bf16 or f32 a small normal number: neither zero nor subnormal, which would be timed wrong


@functools.cache
def _compute() -> tuple[Any, Any]:
    """libggml-base and ggml's entry into its processor backend."""
    base, cpu = repack.libraries()
    for library, name, result, arguments in (
        (base, "ggml_new_graph_custom", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool]),
        (base, "ggml_build_forward_expand", None, [ctypes.c_void_p, ctypes.c_void_p]),
        (base, "ggml_row_size", ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]),
        (cpu, "ggml_graph_compute_with_ctx", ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]),
    ):
        function = getattr(library, name, None)
        if function is None:
            raise NativeError(f"this llama-cpp-python has no {name}; install a tested version")
        function.restype, function.argtypes = result, arguments
    return base, cpu


def seconds_per_byte(
    type_name: str, width: int, rows: int, threads: int, *, seconds: float = 0.1, weights: int = WEIGHTS
) -> tuple[float, float] | None:
    """Seconds by the clock, and of all processors together, per byte of weights: a vector times ``[width, rows]``.

    ``weights`` is how many bytes are gone through, in turn. Means over some ``seconds``, so that what other programs
    take of the processor counts as it would in a run.
    None for a type or a width that ggml has no product for.
    """
    code = repack.type_codes().get(type_name)
    base, cpu = _compute()
    if code is None or type_name in _NO_WEIGHTS or width % base.ggml_blck_size(code):
        return None
    row = base.ggml_row_size(code, width)
    rows = max(1, min(rows, weights // row))
    count = max(1, min(_MOST_NODES, weights // (row * rows)))
    # ggml ends the process where a context is full: tensors and what they are multiplied to, the graph, and slack
    each = row * rows + 4 * rows + 2 * _OVERHEAD
    region = memory.reserve(count * each + 4 * width + _SLACK, huge=True)
    context = 0
    try:
        memory.fill(region.address, _PATTERN, region.nbytes)
        context = base.ggml_init(lib.InitParams(region.nbytes, region.address, False))
        if not context:
            raise NativeError("ggml refused a context; the system is out of memory")
        vector = base.ggml_new_tensor_2d(context, tensor.TYPE_F32, width, 1)
        graph = base.ggml_new_graph_custom(context, 2 * count, False)
        for _ in range(count):
            weights = base.ggml_new_tensor_2d(context, code, width, rows)
            base.ggml_build_forward_expand(graph, base.ggml_mul_mat(context, weights, vector))
        rounds, wall, spent = 0, 0.0, 0.0
        before = base.ggml_used_mem(context)
        _once(cpu, context, graph, threads)  # warms up
        taken = max(1, base.ggml_used_mem(context) - before)
        most = min(_MOST_ROUNDS, (region.nbytes - base.ggml_used_mem(context)) // taken - 1)
        while rounds < most and (rounds < _LEAST_ROUNDS or wall < seconds):
            began, used = time.perf_counter(), time.process_time()
            _once(cpu, context, graph, threads)
            wall += time.perf_counter() - began
            spent += time.process_time() - used
            rounds += 1
        nbytes = row * rows * count * rounds
        if not nbytes:
            return None
        return wall / nbytes, spent / nbytes
    finally:
        if context:
            base.ggml_free(context)
        region.close()


def _once(cpu: Any, context: int, graph: int, threads: int) -> None:
    """Compute; each time takes a work buffer, a few hundred bytes a thread and row, from the context."""
    if cpu.ggml_graph_compute_with_ctx(context, graph, threads):
        raise NativeError("ggml could not compute a product; install a tested llama-cpp-python")
