"""Append every record of a run to a file, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from pydantic import Field

from bmoe import hookimpl
from bmoe.contracts import Facts, Provider, RunRecord, RunSummary, Sink, TokenRecord
from bmoe.errors import PluginError
from bmoe.telemetry import record_json
from bmoe_plugins.sinks._file import ELSEWHERE, ROOM, FileOptions, refused


class JsonlOptions(FileOptions):
    """Options of the ``jsonl`` sink."""

    flush: bool = Field(default=False, description="write each token out at once; otherwise when the buffer is full")


class Jsonl:
    """Writes ``run``, ``token`` and ``summary`` lines; each run appends to the same file."""

    def __init__(self, options: JsonlOptions) -> None:
        self._path = Path(options.path)
        self._flush = options.flush
        self._file: TextIO | None = None
        self._append().close()  # a path that cannot be written is refused before the model is read

    def open(self, run: RunRecord, /) -> None:
        """Open the file and write the run; raises :class:`PluginError` naming the option."""
        self._file = self._append()
        try:
            self._write(run, flush=True)
        except PluginError:
            self._release()
            raise

    def token(self, record: TokenRecord, /) -> None:
        """Write one token; raises :class:`PluginError` naming the option."""
        self._write(record, flush=self._flush)

    def close(self, summary: RunSummary | None, /) -> None:
        """Write the summary, if there is one, and close the file; raises :class:`PluginError` naming the option."""
        try:
            self._write(summary, flush=True)
        finally:
            self._release()

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what is left in the buffer was refused before
                file.close()

    def _append(self) -> TextIO:
        try:
            return self._path.open("a", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise refused(self._path, error, ELSEWHERE) from error

    def _write(self, record: RunRecord | TokenRecord | RunSummary | None, *, flush: bool) -> None:
        if self._file is None:
            return
        try:
            if record is not None:
                self._file.write(json.dumps(record_json(record)) + "\n")
            if flush:
                self._file.flush()
        except OSError as error:
            raise refused(self._path, error, ROOM) from error


def _build(options: JsonlOptions, facts: Facts) -> Jsonl:
    return Jsonl(options)


@hookimpl
def bmoe_sinks() -> Sequence[Provider[Sink]]:
    """The ``jsonl`` sink."""
    return [Provider("jsonl", _build, JsonlOptions, summary="append records to a file, one JSON object a line")]
