"""What a gguf file says before its tensor data: metadata values and the tensor table, read in bounded memory.

A vocabulary of 150 000 strings is stepped over, not built, and no length that the file claims is allocated before the
file is known to hold that many bytes. The layout follows ``gguf.h`` of llama.cpp, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias

from bmoe.bundled import suggest_model
from bmoe.errors import ModelError

Scalar: TypeAlias = "int | float | bool | str"
Value: TypeAlias = "Scalar | tuple[int | float | bool, ...]"

_CHUNK = 1 << 20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_MAX_KEYS, _MAX_TENSORS, _MAX_ELEMENTS = 1 << 16, 1 << 18, 1 << 24
_MAX_NAME, _MAX_TEXT, _MAX_KEPT, _MAX_ALIGNMENT = 1 << 10, 1 << 20, 1 << 12, 1 << 20
_IN_MEMORY = 32  # TENSOR_ALIGNMENT of ggml-backend.cpp: what lies otherwise in a mapping ends the process
_MAX_HELD, _ENTRY, _NUMBER = 8 << 20, 256, 32  # bytes of memory; what a table row and a number take, roughly

_FOREIGN = (
    (b"version https://git-lfs", "a git-lfs pointer", "fetch the file itself, for instance with git lfs pull"),
    (b"PK\x03\x04", "a zip archive (PyTorch weights, perhaps)", "convert the model to gguf"),
    (b"\x1f\x8b", "a gzip file", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it first"),
    (b"tjgg", "a ggml file from before gguf", "get the model as gguf"),
    (b"lmgg", "a ggml file from before gguf", "get the model as gguf"),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of the tensor table: absolute ``offset`` and ``nbytes`` in the file, ``shape`` fastest axis first."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A gguf's metadata and tensor table. ``lengths`` has the element count of every array, also of those not kept.

    ``values`` keeps scalars, texts of at most 1 MiB, and arrays of at most 4096 numbers; of a longer text ``lengths``
    has the bytes.
    """

    path: str
    nbytes: int
    values: Mapping[str, Value]
    lengths: Mapping[str, int]
    tensors: tuple[TensorEntry, ...]


class Source(Protocol):
    """What a header is read from: bytes from a position on, which is moved forwards."""

    def read(self, size: int, /) -> bytes | None:
        """Up to ``size`` bytes; none at the end."""

    def seek(self, offset: int, /) -> int:
        """Go to ``offset``, and return it."""


def read_header(path: str) -> Header:
    """Read the header of one gguf file; raises :class:`ModelError` in one line, whatever the bytes are."""
    try:
        info = os.stat(path)
        if stat.S_ISDIR(info.st_mode):
            raise ModelError(f"{path}: is a directory; name the .gguf file in it (the first shard of several)")
        if not stat.S_ISREG(info.st_mode):
            raise ModelError(f"{path}: is not a regular file; name a .gguf file")
        with open(path, "rb", buffering=0) as file:
            return read_header_from(path, file, info.st_size)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; {suggest_model(path)}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(f"{path!s}: cannot be read ({reason}); check the path and its permissions") from error


def read_header_from(path: str, file: Source, size: int, chunk: int = _CHUNK) -> Header:
    """Read the header of what has ``size`` bytes and is called ``path``, ``chunk`` bytes at a time and only forwards.

    What lies between two reads is never asked for. Raises :class:`ModelError`, and what ``file`` raises.
    """
    return _Reader(path, file, size, chunk).header()


class _Reader:
    """A window of one chunk that moves forward over the file."""

    def __init__(self, path: str, file: Source, size: int, chunk: int) -> None:
        self._path, self._file, self._size, self._chunk = path, file, size, chunk
        self._window, self._start, self._at = b"", 0, 0
        self._held = 0

    def header(self) -> Header:
        n_tensors, n_keys = self._preamble()
        values: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        for index in range(n_keys):
            key = self._text(_MAX_NAME, f"the name of metadata key {index}")
            if key in values or key in lengths:
                self._damaged(f"metadata key {key!r} appears twice")
            self._value(key, values, lengths)
        return Header(self._path, self._size, values, lengths, self._tensors(n_tensors, values))

    # ---- errors

    def _fail(self, what: str, remedy: str) -> NoReturn:
        raise ModelError(f"{self._path}: {what}; {remedy}")

    def _damaged(self, what: str) -> NoReturn:
        self._fail(f"damaged gguf header: {what}", "download or convert the file again")

    def _position(self) -> int:
        return self._start + self._at

    # ---- bytes

    def _hold(self, nbytes: int) -> None:
        """Account for what stays in memory: no real header comes near the limit, and a hostile one ends there."""
        self._held += nbytes
        if self._held > _MAX_HELD:
            self._damaged(f"it would take more than {_MAX_HELD >> 20} MiB of memory")

    def _need(self, count: int, what: str) -> None:
        """Have ``count`` bytes in the window; ``count`` was bounded by the caller, never taken from the file as is."""
        if self._at + count <= len(self._window):
            return
        if self._position() + count > self._size:
            missing = self._position() + count - self._size
            self._fail(
                f"truncated gguf header: {what} ends at least {missing} bytes beyond the file's {self._size}",
                "the download is incomplete, resume or repeat it",
            )
        parts = [self._window[self._at :]]
        have, want = len(parts[0]), max(count, self._chunk)
        while have < want and (part := self._file.read(want - have)):
            parts.append(part)
            have += len(part)
        self._start, self._at, self._window = self._position(), 0, b"".join(parts)
        if have < count:
            self._fail(f"the file became shorter while {what} was read", "leave it alone while it is opened")

    def _number(self, form: struct.Struct, what: str) -> int | float | bool:
        self._need(form.size, what)
        (number,) = form.unpack_from(self._window, self._at)
        self._at += form.size
        return number  # type: ignore[no-any-return]

    def _count(self, form: struct.Struct, what: str) -> int:
        return int(self._number(form, what))

    def _text(self, limit: int, what: str) -> str:
        length = self._count(_U64, what)
        if length > limit:
            self._damaged(f"{what} claims {length} bytes (at most {limit} make sense)")
        return self._take(length, what)

    def _take(self, length: int, what: str) -> str:
        self._hold(_ENTRY + length)
        self._need(length, what)
        raw = self._window[self._at : self._at + length]
        self._at += length
        return raw.decode("utf-8", "replace")

    # ---- parts

    def _preamble(self) -> tuple[int, int]:
        if self._size == 0:
            self._fail("is empty (0 bytes)", "the download failed, repeat it")
        self._need(min(self._size, 64), "the magic")
        if not self._window.startswith(b"GGUF"):
            self._foreign(self._window[:512])
        self._at = 4
        version = self._count(_U32, "the version")
        if version and not version & 0xFFFF:
            self._fail("is a big-endian gguf", "convert it to little-endian, for instance with gguf-convert-endian")
        if version not in (2, 3):
            self._fail(f"gguf version {version} is not supported (2 and 3 are)", "convert the model again")
        n_tensors = self._count(_U64, "the tensor count")
        n_keys = self._count(_U64, "the metadata count")
        if n_tensors > _MAX_TENSORS or n_keys > _MAX_KEYS:
            self._damaged(f"it claims {n_tensors} tensors and {n_keys} metadata keys")
        return n_tensors, n_keys

    def _foreign(self, head: bytes) -> NoReturn:
        for magic, what, remedy in _FOREIGN:
            if head.startswith(magic):
                self._fail(f"is {what}, not a gguf", remedy)
        text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
            self._fail("is an HTML page, not a gguf", "use the direct download address of the file")
        if head[8:10] == b'{"':
            self._fail("is a safetensors file, not a gguf", "convert the model to gguf")
        self._fail(f"is not a gguf (it starts with {head[:4]!r}, not b'GGUF')", "name a .gguf file")

    def _value(self, key: str, values: dict[str, Value], lengths: dict[str, int]) -> None:
        what = f"metadata key {key!r}"
        kind = self._count(_U32, what)
        if kind == _STRING:
            self._long_text(key, what, values, lengths)
        elif kind == _ARRAY:
            lengths[key] = self._array(key, what, values)
        elif form := _SCALARS.get(kind):
            values[key] = self._number(form, what)
        else:
            self._damaged(f"{what} has the unknown type {kind}")

    def _long_text(self, key: str, what: str, values: dict[str, Value], lengths: dict[str, int]) -> None:
        """Keep a text, but step over one that is longer than any that is needed, such as a whole tokenizer.json."""
        length = self._count(_U64, what)
        if length > _MAX_TEXT:
            self._skip(length, what)
            lengths[key] = length
        else:
            values[key] = self._take(length, what)

    def _array(self, key: str, what: str, values: dict[str, Value]) -> int:
        kind, count = self._count(_U32, what), self._count(_U64, what)
        if count > _MAX_ELEMENTS:
            self._damaged(f"{what} claims {count} elements")
        if kind == _STRING:
            self._skip_strings(count, what)
        elif form := _SCALARS.get(kind):
            if count <= _MAX_KEPT:
                self._hold(count * _NUMBER)
                values[key] = tuple(self._number(form, what) for _ in range(count))
            else:
                self._skip(count * form.size, what)
        else:
            self._damaged(f"{what} is an array of the unknown type {kind}")
        return count

    def _skip(self, count: int, what: str) -> None:
        if self._position() + count > self._size:
            self._need(self._size - self._position() + 1, what)
        within = min(count, len(self._window) - self._at)
        self._at += within
        if count > within:
            self._start = self._file.seek(self._position() + count - within)
            self._window, self._at = b"", 0

    def _skip_strings(self, count: int, what: str) -> None:
        unpack = _U64.unpack_from
        left = count
        while left:
            window, at, end = self._window, self._at, len(self._window) - 8
            while left and at <= end:
                step = at + 8 + unpack(window, at)[0]
                if step > end + 8:
                    break
                at = step
                left -= 1
            self._at = at
            if left:  # the next string crosses the window's edge
                self._skip(self._count(_U64, what), what)
                left -= 1

    def _tensors(self, count: int, values: Mapping[str, Value]) -> tuple[TensorEntry, ...]:
        types = _type_table()
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            self._damaged(f"general.alignment is {alignment!r}, not a power of two")
        rows: list[tuple[str, tuple[int, ...], str, int, int]] = []
        names: set[str] = set()
        end = 0
        for index in range(count):
            name = self._text(_MAX_NAME, f"the name of tensor {index}")
            if name in names:
                self._damaged(f"tensor {name!r} appears twice")
            names.add(name)
            row = self._tensor(name, types)
            if row[3] != end:  # llama.cpp demands it too: no gaps beyond the padding, no overlap
                self._damaged(f"tensor {name!r} is at offset {row[3]} of the data, {end} was expected")
            end += (row[4] + alignment - 1) // alignment * alignment
            rows.append(row)
        start = (self._position() + alignment - 1) // alignment * alignment
        if rows and (missing := start + rows[-1][3] + rows[-1][4] - self._size) > 0:
            whole = start + rows[-1][3] + rows[-1][4]
            self._fail(
                f"truncated: {missing} of {whole} bytes are missing, tensor {rows[-1][0]!r} ends beyond the file",
                "the download is incomplete, resume or repeat it",
            )
        entries = tuple(TensorEntry(n, shape, kind, start + offset, size) for n, shape, kind, offset, size in rows)
        for entry in entries if alignment < _IN_MEMORY else ():
            if entry.offset % _IN_MEMORY:
                self._fail(
                    f"tensor {entry.name!r} is at byte {entry.offset}, no multiple of {_IN_MEMORY} (general.alignment "
                    f"is {alignment}), and llama.cpp aborts on that",
                    f"convert the model again with an alignment of {_IN_MEMORY} or more",
                )
        return entries

    def _tensor(
        self, name: str, types: Mapping[int, tuple[str, int, int]]
    ) -> tuple[str, tuple[int, ...], str, int, int]:
        what = f"the table row of tensor {name!r}"
        n_dims = self._count(_U32, what)
        if not 1 <= n_dims <= 4:
            self._damaged(f"tensor {name!r} has {n_dims} dimensions")
        shape = tuple(self._count(_U64, what) for _ in range(n_dims))
        kind = self._count(_U32, what)
        if kind not in types:
            self._fail(f"tensor {name!r} has the unknown type {kind}", "update bmoe and the gguf package")
        type_name, block, block_bytes = types[kind]
        elements = 1
        for extent in shape:
            elements *= extent
        if not 0 < elements < 1 << 63 or shape[0] % block:
            self._damaged(f"tensor {name!r} of type {type_name} has the shape {list(shape)}")
        return name, shape, type_name, self._count(_U64, what), elements // block * block_bytes


def _type_table() -> dict[int, tuple[str, int, int]]:
    """Tensor type number → name, elements a block, bytes a block."""
    from gguf.constants import GGML_QUANT_SIZES  # costs 0.1 s, and only opening a model needs it

    return {int(kind): (kind.name, block, nbytes) for kind, (block, nbytes) in GGML_QUANT_SIZES.items()}
