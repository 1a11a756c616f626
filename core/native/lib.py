"""Finds the libraries that llama-cpp-python has already mapped and declares the few prototypes that it does not."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from bmoe.errors import NativeError

TESTED = ((0, 3, 36), (0, 4))
"""llama-cpp-python versions: from the first, below the second. The tensor self-check is the second guard."""

EvalCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
AbortCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@functools.cache
def llama() -> Any:
    """llama-cpp-python's 1:1 binding of llama.h (module ``llama_cpp.llama_cpp``).

    Raises NativeError if it is not installed or its version is outside the tested range.
    """
    try:
        package = importlib.import_module("llama_cpp")
        binding = importlib.import_module("llama_cpp.llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        raise NativeError(f"llama-cpp-python cannot be loaded ({error}); install it with: make demo") from error
    version = tuple(int(part) for part in re.findall(r"\d+", package.__version__)[:3])
    if not TESTED[0] <= version < TESTED[1]:
        first, last = (".".join(map(str, v)) for v in TESTED)
        raise NativeError(
            f"llama-cpp-python {package.__version__} is not supported; install one from {first} to below {last}"
        )
    return binding


class InitParams(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_get_name": (ctypes.c_char_p, [_PTR]),
    "ggml_set_name": (_PTR, [_PTR, ctypes.c_char_p]),
    "ggml_get_data": (_PTR, [_PTR]),
    "ggml_nbytes": (ctypes.c_size_t, [_PTR]),
    "ggml_op_name": (ctypes.c_char_p, [ctypes.c_int]),
    "ggml_init": (_PTR, [InitParams]),
    "ggml_free": (None, [_PTR]),
    "ggml_used_mem": (ctypes.c_size_t, [_PTR]),
    "ggml_tensor_overhead": (ctypes.c_size_t, []),
    "ggml_new_tensor_2d": (_PTR, [_PTR, ctypes.c_int, _I64, _I64]),
    "ggml_new_tensor_3d": (_PTR, [_PTR, ctypes.c_int, _I64, _I64, _I64]),
    "ggml_mul_mat_id": (_PTR, [_PTR, _PTR, _PTR, _PTR]),
    "ggml_view_2d": (_PTR, [_PTR, _PTR, _I64, _I64, ctypes.c_size_t, ctypes.c_size_t]),
}


def mapped_copies(stem: str, maps: str) -> list[str]:
    """Paths of the distinct files named ``stem``* among executable mappings in the text of ``/proc/self/maps``."""
    found: dict[tuple[str, str], str] = {}
    for line in maps.splitlines():
        parts = line.split(None, 5)
        if len(parts) == 6 and Path(parts[5]).name.startswith(stem) and ".so" in Path(parts[5]).name:
            found.setdefault((parts[3], parts[4]), parts[5])
    return list(found.values())


@functools.cache
def ggml() -> ctypes.CDLL:
    """libggml-base as llama.cpp mapped it, with prototypes for what this package calls.

    Raises NativeError if no copy, or more than one, is mapped: two copies would not share their state.
    """
    directory = Path(str(llama().__file__)).parent / "lib"
    if sys.platform.startswith("linux"):
        copies = mapped_copies("libggml-base", Path("/proc/self/maps").read_text())
        if len(copies) != 1:
            raise NativeError(f"expected one mapped libggml-base, found {copies or 'none'}; reinstall llama-cpp-python")
        library = ctypes.CDLL(copies[0], mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    else:
        library = ctypes.CDLL(str(next(iter(sorted(directory.glob("*ggml-base*"))))))
    for name, (restype, argtypes) in _PROTOTYPES.items():
        function = getattr(library, name, None)
        if function is None:
            raise NativeError(f"libggml-base has no {name}; install a tested llama-cpp-python")
        function.restype, function.argtypes = restype, argtypes
    return library
