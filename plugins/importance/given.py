"""Importance from a file: a JSON list with one number per token of the prompt.

For scores that were worked out elsewhere, and for experiments. The file is read when the profile is checked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Importance, Options
from bmoe.errors import PluginError

_REMEDY = "give a JSON list with one number per token of the prompt"


class GivenOptions(Options):
    """Where the numbers are."""

    file: str = Field(min_length=1, description="JSON file with a list of numbers, one per token of the prompt")

    @field_validator("file")
    @classmethod
    def _readable(cls, file: str) -> str:
        _read(file)
        return file


class Given:
    """Scores a prompt of as many tokens as there are numbers, and no other."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._scores = _read(file)

    def score(self, prompt: Sequence[int], text: str, spans: Sequence[tuple[int, int]], /) -> Sequence[float]:
        if len(self._scores) != len(prompt):
            said = f"has {len(self._scores)} numbers, and the prompt has {len(prompt)} tokens"
            raise PluginError(f'options.file = "{self._file}" {said}; give one for each')
        return self._scores


def _read(file: str) -> list[float]:
    """The numbers of a file. Raises ValueError in words that follow its name."""
    path = Path(file)
    if not path.is_file():  # a pipe would never end
        raise ValueError(f"is not a file; {_REMEDY}")
    try:
        found: Any = json.loads(path.read_text("utf-8"))
    except OSError as exc:
        raise ValueError(f"cannot be read ({exc.strerror}); {_REMEDY}") from exc
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"is not JSON; {_REMEDY}") from exc
    if not isinstance(found, list) or not found:
        raise ValueError(f"has no list of numbers; {_REMEDY}")
    for index, number in enumerate(found):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= sys.float_info.max:
            raise ValueError(f"has {json.dumps(number)[:40]} at place {index}; give numbers of 0 or more")
    return [float(number) for number in found]


def _build(options: GivenOptions, facts: Facts, /) -> Importance:
    try:
        return Given(options.file)
    except ValueError as exc:
        raise PluginError(f'options.file = "{options.file}" {exc}') from exc


@hookimpl
def bmoe_importance() -> list[Provider[Importance]]:
    """Return the scorer that reads a file."""
    return [Provider("given", _build, GivenOptions, summary="numbers from a file")]
