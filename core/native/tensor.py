"""The one definition of ``struct ggml_tensor``, checked at start-up against what libggml-base itself says.

Source of the layout: ``ggml/include/ggml.h`` of the llama.cpp that llama-cpp-python 0.3.36 carries. No setter for
``data`` is exported, so rebinding an expert tensor needs the structure; a mismatch is refused before any write.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from bmoe.errors import NativeError
from bmoe.native import lib

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_DIMS, MAX_SRC, MAX_NAME = 4, 10, 64
TYPE_F32, TYPE_I32 = 0, 26


class GgmlTensor(ctypes.Structure):
    """``struct ggml_tensor``: ``ne`` elements and ``nb`` strides in bytes, fastest axis first."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * MAX_DIMS),
        ("nb", ctypes.c_size_t * MAX_DIMS),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * MAX_SRC),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * MAX_NAME),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]

    type: int
    op: int
    data: int | None
    name: bytes
    view_src: int | None


def offset_of(field: str) -> int:
    """Where a field lies in the structure, in bytes."""
    return int(getattr(GgmlTensor, field).offset)


def at(address: int) -> GgmlTensor:
    """The tensor at an address that llama.cpp gave; writes go to llama.cpp's own structure."""
    return GgmlTensor.from_address(address)


def matrix_i32(address: int) -> NDArray[np.int32]:
    """The 32-bit integers of a two-dimensional tensor, [ne1, ne0] whatever its strides; a view of llama.cpp's memory.

    An empty array if it has no memory.
    """
    import numpy as np

    node = at(address)
    columns, rows = node.ne[0], node.ne[1]
    if not node.data or not columns or not rows:
        return np.empty((0, columns), dtype=np.int32)
    size = (rows - 1) * node.nb[1] + (columns - 1) * node.nb[0] + 4
    memory = (ctypes.c_char * size).from_address(node.data)
    found: NDArray[np.int32] = np.ndarray((rows, columns), np.int32, memory, strides=(node.nb[1], node.nb[0]))
    return found


def matrix_f32(address: int) -> NDArray[np.float32]:
    """The floats of a two-dimensional tensor, [ne1, ne0] whatever its strides; a view of llama.cpp's memory.

    An empty array if it has no memory.
    """
    import numpy as np

    return matrix_i32(address).view(np.float32)


@functools.cache
def op_name(code: int) -> str:
    """The name of a graph operation."""
    return str(lib.ggml().ggml_op_name(code).decode())


@functools.cache
def op_code(name: str) -> int:
    """The number of a graph operation such as ``MUL_MAT_ID``; NativeError if this ggml has no such operation."""
    library = lib.ggml()
    for code in range(256):
        text = library.ggml_op_name(code)
        if text == name.encode():
            return code
        if not text:
            break
    raise NativeError(f"libggml-base knows no operation {name}; install a tested llama-cpp-python")


@functools.cache
def self_check() -> None:
    """Compare the structure with the exported getters on a small graph; NativeError names the first field that differs.

    Run once per process, before anything is rebound.
    """
    g = lib.ggml()
    context = g.ggml_init(lib.InitParams(1 << 16, None, False))
    if not context:
        raise NativeError("ggml_init refused 64 KiB; the system is out of memory")
    try:
        before = g.ggml_used_mem(context)
        weights = g.ggml_new_tensor_3d(context, TYPE_F32, 4, 6, 3)
        size = g.ggml_used_mem(context) - before - 4 * 6 * 3 * 4
        inputs = g.ggml_new_tensor_3d(context, TYPE_F32, 4, 2, 5)
        ids = g.ggml_new_tensor_2d(context, TYPE_I32, 8, 5)
        view = g.ggml_view_2d(context, ids, 2, 5, 32, 8)
        product = g.ggml_mul_mat_id(context, weights, inputs, view)
        g.ggml_set_name(weights, b"bmoe.self-check")
        w, v, p = at(weights), at(view), at(product)
        facts = {
            "size": (ctypes.sizeof(GgmlTensor) + 32, size),
            "name": (w.name, g.ggml_get_name(weights)),
            "data": (w.data, g.ggml_get_data(weights)),
            "view data": (v.data, g.ggml_get_data(ids) + 8),
            "ne": (list(w.ne), [4, 6, 3, 1]),
            "nb": (list(w.nb), [4, 16, 96, 288]),
            "view nb": (list(v.nb)[:2], [4, 32]),
            "nbytes": (w.nb[2] * w.ne[2], g.ggml_nbytes(weights)),
            "type": ((w.type, v.type), (TYPE_F32, TYPE_I32)),
            "op": (p.op, op_code("MUL_MAT_ID")),
            "src": (list(p.src)[:4], [weights, inputs, view, None]),
            "view_src": (v.view_src, ids),
        }
    finally:
        g.ggml_free(context)
    for field, (ours, theirs) in facts.items():
        if ours != theirs:
            raise NativeError(
                f"struct ggml_tensor differs from this llama-cpp-python: {field} reads {ours!r}, expected {theirs!r}; "
                "install a tested version"
            )
