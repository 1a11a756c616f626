"""The models and data sets that come with bmoe: which there are, and how a name becomes a file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path


def bundled_models() -> Mapping[str, Path]:
    """The gguf files that come with bmoe, by name."""
    return _files("gguf")


def bundled_sets() -> Mapping[str, Path]:
    """The data sets that come with bmoe, by name."""
    return _files("jsonl")


def find_model(path: str) -> str:
    """``path`` as it is if something is there, else the file of the bundled model of this name, else ``path``."""
    return _find(path, bundled_models)


def find_set(path: str) -> str:
    """As :func:`find_model`, for a data set."""
    return _find(path, bundled_sets)


def suggest_model(path: str) -> str:
    """What to do about a model that is not there: the bundled ones, if ``path`` looks like a name."""
    return _suggest(path, bundled_models(), "check the path or download the model")


def suggest_set(path: str) -> str:
    """As :func:`suggest_model`, for a data set."""
    return _suggest(path, bundled_sets(), "check the path")


def _suggest(path: str, bundled: Mapping[str, Path], remedy: str) -> str:
    close = difflib.get_close_matches(Path(path).stem, bundled, n=1, cutoff=0.8)
    return f'{remedy}; did you mean "{close[0]}", which comes with bmoe?' if close else remedy


def _find(path: str, bundled: Callable[[], Mapping[str, Path]]) -> str:
    # a name has no folder and no ending, so that a file that is missing is not taken for another
    if os.path.lexists(path) or os.sep in path or "." in path:
        return path
    return str(bundled().get(path, path))


def _files(ending: str) -> Mapping[str, Path]:
    folder = Path(str(files("bmoe") / "models"))
    return {path.stem: path for path in sorted(folder.glob(f"*.{ending}"))}
