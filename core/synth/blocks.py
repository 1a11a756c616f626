"""Random weights as the bytes of ggml's quantised blocks, made directly: valid, finite, of a wanted deviation.

Block layouts are those of ``ggml-common.h``. Quants are random bits; the block scales are constant, so that any
bytes of two rows can be exchanged and both stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

BLOCK: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "Q4_0": (32, 18),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
}
"""Quantisation → weights a block, bytes a block."""

_RMS_NIBBLE = math.sqrt(sum((q - 8) ** 2 for q in range(16)) / 16)
_RMS_BYTE = math.sqrt(sum(q * q for q in range(-128, 128)) / 256)
_RMS_SIXBIT = math.sqrt(sum((q - 32) ** 2 for q in range(64)) / 64)
_RMS_FP4 = math.sqrt(sum(v * v for v in (0, 1, 2, 3, 4, 6, 8, 12)) / 8)
_CENTRED = math.sqrt(sum((q - 7.5) ** 2 for q in range(16)) / 16)
_SUBSCALES = (20, 44, 28, 36, 32, 24, 40, 30)


def row_bytes(quant: str, width: int) -> int:
    """Bytes of a row of ``width`` weights."""
    block, nbytes = (1, 4) if quant == "I32" else BLOCK[quant]
    return width // block * nbytes


def random_rows(quant: str, width: int, count: int, deviation: float, rng: np.random.Generator) -> Bytes:
    """``count`` rows of ``width`` random weights with standard deviation ``deviation``; uint8 [count, bytes a row]."""
    if quant == "F32":
        weights = rng.standard_normal((count, width), dtype=np.float32)
        weights *= np.float32(deviation)
        return weights.view(np.uint8)
    block, nbytes = BLOCK[quant]
    size = count * (width // block) * nbytes
    words = rng.integers(0, 1 << 64, (size + 7) // 8, dtype=np.uint64)
    blocks = words.view(np.uint8)[:size].reshape(-1, nbytes)
    _SCALE[quant](blocks, deviation)
    return blocks.reshape(count, -1)


def _half(value: float) -> Bytes:
    return np.array([value], dtype="<f2").view(np.uint8)


def _scale_q4_0(blocks: Bytes, deviation: float) -> None:
    blocks[:, 0:2] = _half(deviation / _RMS_NIBBLE)


def _scale_q8_0(blocks: Bytes, deviation: float) -> None:
    blocks[:, 0:2] = _half(deviation / _RMS_BYTE)


def _scale_q4_k(blocks: Bytes, deviation: float) -> None:
    # weight = d * scale * q - dmin * min; with min = scale and dmin = 7.5 d the mean is 0
    rms = math.sqrt(sum(s * s for s in _SUBSCALES) / len(_SUBSCALES))
    d = deviation / (_CENTRED * rms)
    blocks[:, 0:2] = _half(d)
    blocks[:, 2:4] = _half(7.5 * d)
    low = [s | (high >> 4) << 6 for s, high in zip(_SUBSCALES[:4], _SUBSCALES[4:], strict=True)]
    packed = [(high & 15) | (high & 15) << 4 for high in _SUBSCALES[4:]]
    blocks[:, 4:16] = np.array([*low, *low, *packed], dtype=np.uint8)


def _scale_q6_k(blocks: Bytes, deviation: float) -> None:
    blocks[:, 192:208] = np.array([64, -64] * 8, dtype=np.int8).view(np.uint8)
    blocks[:, 208:210] = _half(deviation / (_RMS_SIXBIT * 64))


def _scale_mxfp4(blocks: Bytes, deviation: float) -> None:
    # the scale is a power of two, so the deviation is met within a factor of 1.5
    blocks[:, 0] = 128 + max(-120, round(math.log2(deviation / _RMS_FP4))) if deviation else 0


_SCALE: dict[str, Callable[[Bytes, float], None]] = {
    "Q4_0": _scale_q4_0,
    "Q8_0": _scale_q8_0,
    "Q4_K": _scale_q4_k,
    "Q6_K": _scale_q6_k,
    "MXFP4": _scale_mxfp4,
}
