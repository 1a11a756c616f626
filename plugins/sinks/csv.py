"""Append one row per token to a file that any spreadsheet reads."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from bmoe import hookimpl
from bmoe.contracts import Facts, Provider, RunRecord, RunSummary, Sink, TokenRecord
from bmoe.errors import PluginError
from bmoe.telemetry import record_json
from bmoe_plugins.sinks._file import ELSEWHERE, ROOM, FileOptions, refused

COLUMNS = ("run_id", *(field.name for field in dataclasses.fields(TokenRecord)), "compute_s")


class Csv:
    """Rows of several runs in one file, told apart by ``run_id``. What was not measured is an empty cell."""

    def __init__(self, options: FileOptions) -> None:
        self._path = Path(options.path)
        self._run_id = ""
        self._file: TextIO | None = None
        self._rows: Any = None
        self._append().close()  # what cannot be written is refused before the model is read

    def open(self, run: RunRecord, /) -> None:
        """Open the file, and write the names of the columns if it is new; raises PluginError naming the option."""
        self._run_id, self._file = run.run_id, self._append()
        self._rows = csv.writer(self._file, lineterminator="\n")
        if not self._file.tell():
            self._write(COLUMNS)

    def token(self, record: TokenRecord, /) -> None:
        """Write one row; raises PluginError naming the option."""
        values = {**record_json(record), "run_id": self._run_id}
        self._write(["" if values[name] is None else values[name] for name in COLUMNS])

    def close(self, summary: RunSummary | None, /) -> None:
        """Write out what is left; raises PluginError naming the option."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.flush()
        except OSError as error:
            raise refused(self._path, error, ROOM) from error
        finally:
            with contextlib.suppress(OSError):  # what is left in the buffer was refused before
                file.close()

    def _append(self) -> TextIO:
        try:
            with self._path.open("a+", encoding="utf-8", newline="") as file:
                if self._path.is_file() and file.tell():
                    file.seek(0)
                    if next(csv.reader(file), []) != list(COLUMNS):
                        raise PluginError(f'options.path = "{self._path}": has other columns; name another file')
            return self._path.open("a", encoding="utf-8", newline="")
        except (OSError, ValueError, csv.Error) as error:
            raise refused(self._path, error, ELSEWHERE) from error

    def _write(self, row: Sequence[Any]) -> None:
        if self._file is None:
            return
        try:
            self._rows.writerow(row)
        except OSError as error:
            raise refused(self._path, error, ROOM) from error


def _build(options: FileOptions, facts: Facts) -> Csv:
    return Csv(options)


@hookimpl
def bmoe_sinks() -> Sequence[Provider[Sink]]:
    """The ``csv`` sink."""
    return [Provider("csv", _build, FileOptions, summary="append one row per token to a file for spreadsheets")]
