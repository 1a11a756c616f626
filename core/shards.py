"""The files of a model that comes in several: found beside the first, and told apart in words where one is wrong.

The naming and the ``split.*`` keys are those of llama.cpp's gguf-split.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bmoe.errors import ModelError
from bmoe.header import Header, read_header

_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_SHARDS = 1024


@dataclass(frozen=True, slots=True)
class _Split:
    """What a shard says of itself: its number from 0, how many there are, and the tensors of them all."""

    number: int
    count: int
    tensors: int | None


def read_shards(path: str) -> list[Header]:
    """Read the headers of a model's files, the first at ``path``; a model of one file has one.

    Raises :class:`ModelError`: a shard that is missing, renamed, a copy of another, in the place of another, truncated
    or of another model, and a later shard in the place of the first.
    """
    first = read_header(path)
    split = _split(first)
    if split.count <= 1:
        return [first]
    names = _names(path, split)
    missing = [os.path.basename(name) for name in names[1:] if not os.path.exists(name)]
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelError(f"{path}: {len(missing)} of {split.count} shards are missing ({shown}); download them")
    headers = [first, *(read_header(name) for name in names[1:])]
    _check_order(headers)
    _check_tensors(headers, split.tensors)
    return headers


def _split(header: Header) -> _Split:
    count, number = header.values.get("split.count", 1), header.values.get("split.no", 0)
    tensors = header.values.get("split.tensors.count")
    if not isinstance(count, int) or not isinstance(number, int) or not 0 <= number < max(1, count) <= _MAX_SHARDS:
        reason = f"damaged gguf header: it says that it is shard {number!r} (from 0) of {count!r}"
        raise ModelError(f"{header.path}: {reason}; download the file again")
    return _Split(number, count, tensors if isinstance(tensors, int) else None)


def _names(path: str, split: _Split) -> list[str]:
    """The paths of all shards, by the name of the first. Raises ModelError if that is not what is at ``path``."""
    match = _NAME.fullmatch(path)
    if match is None or int(match["count"]) != split.count:
        own = f"NAME-{split.number + 1:05d}-of-{split.count:05d}.gguf"
        reason = f"is shard {split.number + 1} of {split.count} but is not named {own}"
        raise ModelError(f"{path}: {reason}; give every shard its own name back")
    names = [f"{match['prefix']}-{i + 1:05d}-of-{split.count:05d}.gguf" for i in range(split.count)]
    if int(match["number"]) != split.number + 1:
        raise ModelError(f"{path}: {_swapped(split, int(match['number']))}")
    if split.number:
        raise ModelError(f"{path}: is shard {split.number + 1} of {split.count}; name the first shard, {names[0]}")
    return names


def _swapped(split: _Split, number: int) -> str:
    return (
        f"says that it is shard {split.number + 1} of {split.count} but is named as number {number}: shards were "
        "renamed or exchanged; give them their own names back"
    )


def _check_order(headers: Sequence[Header]) -> None:
    """Every shard is the one that its name says, of as many; a copy of another is called one."""
    splits = [_split(header) for header in headers]
    for index, (header, split) in enumerate(zip(headers, splits, strict=True)):
        if split.count != len(headers):
            own = f"a model of {split.count} shards" if split.count > 1 else "a model of one file"
            reason = f"belongs to {own}, not to one of {len(headers)}"
            raise ModelError(f"{header.path}: {reason}; download it again")
        if None not in (split.tensors, splits[0].tensors) and split.tensors != splits[0].tensors:
            reason = f"belongs to a model of {split.tensors} tensors, the first shard to one of {splits[0].tensors}"
            raise ModelError(f"{header.path}: {reason}; all shards have to be of one model, download it again")
        if split.number == index:
            continue
        other = headers[split.number]
        if splits[split.number].number == split.number and header.tensors == other.tensors:
            reason = f"is a copy of shard {split.number + 1}, {os.path.basename(other.path)}"
            raise ModelError(f"{header.path}: {reason}; download shard {index + 1} again")
        raise ModelError(f"{header.path}: {_swapped(split, index + 1)}")


def _check_tensors(headers: Sequence[Header], total: int | None) -> None:
    """No tensor twice, and none missing."""
    seen: dict[str, Header] = {}
    for header in headers:
        for tensor in header.tensors:
            if other := seen.get(tensor.name):
                reason = f"tensor {tensor.name!r} is in {os.path.basename(other.path)} as well"
                raise ModelError(
                    f"{header.path}: {reason}; one of the two is a shard of another model, download both again"
                )
            seen[tensor.name] = header
    if total is not None and total != len(seen):
        reason = f"the shards hold {len(seen)} tensors, and the model has {total}"
        raise ModelError(f"{headers[0].path}: {reason}; a shard is of another model, download them again")
