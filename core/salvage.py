"""What is left of a wrong table: each value that is refused is taken away, so that the rest can be checked too."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from bmoe.problems import Path, explain, meant
from bmoe.tables import Problems, Table

M = TypeVar("M", bound=BaseModel)


def salvage(
    model: type[M], data: Table, where: Callable[[Path], str], problems: Problems, doubts: Collection[Path]
) -> tuple[M, frozenset[Path]]:
    """``data`` as a ``model`` whose every key may be absent, without what is refused; adds that to ``problems``.

    Returns with it the paths whose value is now not what was meant, ``doubts`` included.
    """
    doubtful = set(doubts)
    while True:
        try:
            return model.model_validate(data), frozenset(doubtful)
        except ValidationError as exc:
            found = explain(exc, model, data, where)
        for path in found:
            instead = meant(path, model)
            if instead is not None and not _says(data, instead):
                doubtful.add(instead)
        for path, line in found.items():
            # What was taken away is not missing as well.
            if path not in doubtful:
                problems.setdefault(path, line)
            doubtful.add(take_away(data, path))


def take_away(data: Table, path: Path) -> Path:
    """Remove what is at ``path``, or the table that lacks it; returns the path that is gone.

    A table in a list makes way for one without a meaning, so that those after it keep their index.
    """
    *above, last = path
    at: Any = data
    for part in above:
        if not _says(at, (part,)):
            return path
        at = at[int(part)] if isinstance(at, list) else at[part]
    if isinstance(at, dict) and last in at:
        del at[last]
        return path
    if isinstance(at, list) and len(above) == 1:
        at[int(last)] = {"plugin": "auto"}
        return path
    return take_away(data, tuple(above)) if above else path


def _says(data: Any, path: Path) -> bool:
    for part in path:
        if isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            return False
    return True
