"""Copies of a model's shards in other folders, and which of them to read from, so that several drives work at once."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bmoe.contracts import ModelFacts

_HEAD, _PAGE, _SAMPLES = 1 << 20, 4096, 24


@dataclass(slots=True)
class Copies:
    """``paths``: where each shard is read from. ``problems`` are (index of the root, what is wrong and the remedy)."""

    paths: tuple[str, ...]
    problems: list[tuple[int, str]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def find_copies(model: ModelFacts, roots: Sequence[str | Path]) -> Copies:
    """Assign every shard to one of its copies, so that each drive reads about the same number of bytes of experts.

    A copy has the name of the shard; it is compared in size, in its first bytes and at sampled places. Of copies on
    one drive only the first counts, the model's own before all.
    """
    found = Copies(tuple(shard.path for shard in model.shards))
    choices: list[list[tuple[int, str]]] = []
    for shard in model.shards:
        try:
            choices.append([(os.stat(shard.path).st_dev, shard.path)])
        except OSError:
            choices.append([(-1, shard.path)])
    for index, root in enumerate(roots):
        _look(model, index, Path(root), choices, found)
    found.paths = _balance(model, choices)
    return found


def _look(model: ModelFacts, index: int, root: Path, choices: list[list[tuple[int, str]]], found: Copies) -> None:
    if not root.is_dir():
        found.problems.append((index, f"{root} is not a folder; create it, or leave it out"))
        return
    there = 0
    for number, shard in enumerate(model.shards):
        copy = root / os.path.basename(shard.path)
        try:
            facts = os.stat(copy)
        except OSError:
            continue
        there += 1
        if wrong := _difference(shard.path, str(copy), facts.st_size):
            found.problems.append((index, f"{copy} is no copy of {shard.path}: {wrong}; copy it again, or remove it"))
        elif all(device != facts.st_dev for device, _ in choices[number]):
            choices[number].append((facts.st_dev, str(copy)))
        else:
            found.notices.append(f"{copy} is on the same drive as another copy and is not read")
    if not there:
        names = ", ".join(os.path.basename(shard.path) for shard in model.shards[:2])
        more = ", …" if len(model.shards) > 2 else ""
        found.problems.append((index, f"{root} holds no copy of {names}{more}; copy shards there, or leave it out"))
    elif there < len(model.shards):
        found.notices.append(f"{root} holds {there} of {len(model.shards)} shards")


def _difference(path: str, copy: str, nbytes: int) -> str:
    """How a copy differs, or "" if no difference was seen."""
    try:
        with open(path, "rb", buffering=0) as ours, open(copy, "rb", buffering=0) as theirs:
            size = os.fstat(ours.fileno()).st_size
            if size != nbytes:
                return f"it has {nbytes} bytes instead of {size}"
            draw = random.Random(size)
            places = [(0, _HEAD), (max(0, size - _PAGE), _PAGE)]
            places += [(draw.randrange(max(1, size - _PAGE)), _PAGE) for _ in range(_SAMPLES)]
            for at, length in places:
                if os.pread(ours.fileno(), length, at) != os.pread(theirs.fileno(), length, at):
                    return f"it has other bytes after {at}"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return ""


def _balance(model: ModelFacts, choices: list[list[tuple[int, str]]]) -> tuple[str, ...]:
    """The largest shards first, each to the drive that has least to read so far."""
    nbytes = [0] * len(model.shards)
    for bank in model.banks:
        for p in bank.projections:
            nbytes[p.shard] += p.stride * bank.n_expert
    load: dict[int, int] = {}
    paths = [""] * len(choices)
    for number in sorted(range(len(choices)), key=lambda n: (-nbytes[n], n)):
        device, paths[number] = min(choices[number], key=lambda choice: load.get(choice[0], 0))
        load[device] = load.get(device, 0) + nbytes[number]
    return tuple(paths)
