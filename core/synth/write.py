"""Writes a synthetic model: the header first, then each tensor in chunks, so that no more than a chunk is in memory."""

from __future__ import annotations

import math
import os
import shutil
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from bmoe.errors import ModelError
from bmoe.synth.arguments import check_quant, check_shape, check_target, claim_part
from bmoe.synth.blocks import Bytes, random_rows, row_bytes
from bmoe.synth.recipe import Recipe, TensorPlan
from bmoe.synth.recipes import recipe_of
from bmoe.synth.shapes import Shape
from bmoe.synth.vocabulary import BOS, CHAT_TEMPLATE, EOS, MERGES, N_PLAIN, PAD, make_vocabulary

_CHUNK_BYTES = 512 << 10  # stays in the CPU cache between making and writing it
_ALIGNMENT = 32


def write_model(
    out: str | os.PathLike[str],
    like: str | Shape,
    layers: int | None = None,
    quant: str | None = None,
    seed: int = 0,
    sparse: bool = False,
    locality: float = 0.0,
    overwrite: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Path:
    """Write a gguf with the shape ``like`` (one of ``SHAPES`` by name, or another) and random weights; return its path.

    ``layers`` (of the trunk) and ``quant`` (of the routed experts, one of ``QUANTS``) default to the shape's.
    ``sparse`` leaves the experts as holes that read as zeros. ``locality`` 0..1 makes tokens route alike: two token
    embeddings have the cosine of ``locality * common + (1 - locality) * own``, reached by sharing that part of their
    elements. The same arguments give the same bytes. The file is written as ``OUT.part`` and renamed when it is whole;
    ``progress`` is told the bytes written and those to write, and what it raises ends the writing without a trace.
    Raises :class:`~bmoe.synth.arguments.ArgumentError`, a ModelError, for an argument that cannot be, a place without
    such a file (``overwrite`` replaces a regular file and nothing else) included; ModelError if it cannot be written.
    """
    shape = check_shape(like, layers, seed, locality)
    quant = check_quant(quant, shape)
    path = check_target(out, overwrite)
    recipe = recipe_of(shape, quant)
    plans = recipe.plans
    total = sum(_nbytes(plan) for plan in plans if not (sparse and plan.role == "expert"))
    _check_space(path, total)
    part: Path | None = None
    written = 0

    def advance(count: int) -> None:
        nonlocal written
        written += count
        if progress is not None:
            progress(written, total)

    try:
        part = claim_part(path, overwrite)
        _write_header(part, recipe)
        advance(0)
        with open(part, "r+b") as file:
            file.seek(0, os.SEEK_END)
            for plan in plans:
                file.seek(_padded(file.tell()))
                if plan.role == "expert" and sparse:
                    file.seek(_nbytes(plan), os.SEEK_CUR)
                else:
                    _write_tensor(file, plan, seed, locality, advance)
            file.truncate(_padded(file.tell()))
        check_target(path, overwrite)  # something else may have come there meanwhile
        os.replace(part, path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written ({error.strerror or error}); choose another place") from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
    return path


def _check_space(path: Path, total: int) -> None:
    needed, free = total + (16 << 20), shutil.disk_usage(path.parent).free
    if needed > free:
        raise ModelError(
            f"{path}: {needed >> 20} MiB are needed and {free >> 20} MiB free; "
            "free some space, write fewer layers or leave the experts sparse"
        )


# ---- header


def _write_header(path: Path, recipe: Recipe) -> None:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    shape = recipe.shape
    writer = GGUFWriter(path, shape.arch)
    writer.add_name(f"synthetic {shape.name} ({shape.n_layer} layers)")
    writer.add_quantization_version(2)
    for key, value in recipe.metadata().items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, array):  # of "Q": whole numbers too large for the 32 bits of others
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, GGUFValueType.UINT64)
        else:
            writer.add_array(key, list(value))
    vocabulary = make_vocabulary(shape.n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for plan in recipe.plans:
        kind = GGMLQuantizationType[plan.quant]
        writer.add_tensor_info(plan.name, plan.shape[::-1], np.dtype(np.float32), _nbytes(plan), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _padded(offset: int) -> int:
    return (offset + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _nbytes(plan: TensorPlan) -> int:
    return row_bytes(plan.quant, plan.shape[0]) * math.prod(plan.shape[1:])


# ---- tensor data


def _write_tensor(
    file: BinaryIO, plan: TensorPlan, seed: int, locality: float, advance: Callable[[int], object]
) -> None:
    rng = np.random.default_rng([seed, zlib.crc32(plan.name.encode())])
    width, n_rows = plan.shape[0], math.prod(plan.shape[1:])
    if (fixed := _fixed(plan, rng)) is not None:
        advance(file.write(fixed.tobytes()))
        return
    deviation = _deviation(plan)
    row = row_bytes(plan.quant, width)
    common, shared = _common_part(plan, deviation, locality, rng)
    step = max(1, _CHUNK_BYTES // row)
    for first in range(0, n_rows, step):
        rows = random_rows(plan.quant, width, min(step, n_rows - first), deviation, rng)
        if shared.any():
            rows[:, shared] = common[shared]
        if plan.role == "output" and first < N_PLAIN:
            # bytes and specials are never the likeliest token: text is readable and does not end by chance
            rows[: N_PLAIN - first] = 0
        advance(file.write(rows.data))


def _fixed(plan: TensorPlan, rng: np.random.Generator) -> NDArray[np.generic] | None:
    """The elements of a tensor whose role leaves no choice of a deviation."""
    count = math.prod(plan.shape)
    if plan.role == "norm":
        return np.ones(count, dtype="<f4")
    if plan.role == "decay":
        return -rng.uniform(0.5, 2.0, count).astype("<f4")
    if plan.role == "ids":
        rows = rng.random((count // plan.shape[0], plan.limit)).argsort(axis=1)
        return rows[:, : plan.shape[0]].astype("<i4")
    return None


def _deviation(plan: TensorPlan) -> float:
    """Activations of unit variance stay near it; router and output are steeper, so that choices differ clearly."""
    gain = {"router": 2.0, "output": 3.0}.get(plan.role, 1.0)
    if plan.role == "embedding":
        return 1.0
    if plan.role == "bias":
        return 0.1
    return gain / math.sqrt(plan.shape[0])


def _common_part(
    plan: TensorPlan, deviation: float, locality: float, rng: np.random.Generator
) -> tuple[Bytes, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """A row, and which of its bytes all rows of the embedding share: as many as give the cosine that is asked for."""
    row = row_bytes(plan.quant, plan.shape[0])
    shared = np.zeros(row, dtype=np.bool_)
    if plan.role != "embedding" or not locality:
        return np.zeros(row, dtype=np.uint8), shared
    cosine = locality**2 / (locality**2 + (1 - locality) ** 2)
    unit = 4 if plan.quant == "F32" else 1
    chosen = rng.permutation(row // unit)[: round(cosine * (row // unit))]
    shared.reshape(-1, unit)[chosen] = True
    return random_rows(plan.quant, plan.shape[0], 1, deviation, rng)[0], shared
