"""Splits a model into shards, as llama.cpp's gguf-split does: for tests of what reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def split_model(
    model: Path, folder: Path, place: Callable[[str], int], count: int, name: str = "model"
) -> Sequence[Path]:
    """Write ``model`` as ``count`` shards into ``folder``; ``place`` gives a tensor's shard, from 0. Return the paths.

    The first shard has the metadata, the others what makes them shards. Source: ``tools/gguf-split`` of llama.cpp.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(model)
    arch = reader.fields["general.architecture"].contents()
    paths = [folder / f"{name}-{index + 1:05d}-of-{count:05d}.gguf" for index in range(count)]
    for index, path in enumerate(paths):
        writer = GGUFWriter(path, arch)
        if index:
            writer.kv_data[0].clear()  # gguf-split repeats no metadata, not even the architecture
        for field in reader.fields.values() if index == 0 else ():
            if field.name.startswith("GGUF.") or field.name == "general.architecture":
                continue
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            value: Any = field.contents()
            writer.add_key_value(field.name, value, kind, sub_type=inner)
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors:
            if place(tensor.name) == index:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths
