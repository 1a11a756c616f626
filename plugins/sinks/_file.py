"""What sinks that append to a file share: the option that names it, and words for a place that cannot be written to."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from bmoe.contracts import Options
from bmoe.errors import PluginError

ELSEWHERE, ROOM = "name a file in a directory that exists and can be written", "make room there, or name another file"


class FileOptions(Options):
    """Options of a sink that appends to a file."""

    path: str = Field(min_length=1, description="file that lines are appended to")

    @field_validator("path")
    @classmethod
    def _whole(cls, path: str) -> str:
        return whole(path)


def whole(path: str) -> str:
    """The path; ValueError if it is one that only a shell understands."""
    if path.startswith("~"):
        raise ValueError("starts with ~, which only a shell expands; write the whole path")
    return path


def refused(path: str | Path, error: Exception, remedy: str) -> PluginError:
    """The error of a file that cannot be opened or written to, naming the option."""
    return PluginError(f'options.path = "{path}": {getattr(error, "strerror", None) or error}; {remedy}')
