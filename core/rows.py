"""Which architecture rows hold: what a row must say, rows from TOML files, and which row may take a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bmoe.contracts import ArchRow, Gating, Trait
from bmoe.errors import PluginError, ProfileError
from bmoe.problems import dotted, explain, one_line, suggest, toml_value
from bmoe.tables import read_toml

Sourced = tuple[str, ArchRow]
"""A row and the module or file that it comes from."""


class TomlRow(BaseModel):
    """One ``[[arch]]`` table: the fields of :class:`~bmoe.contracts.ArchRow`."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(strict=True, description="gguf's general.architecture")
    experts: list[list[str]] = Field(
        default=[list(bank) for bank in ArchRow("").experts],
        description='expert tensors of each bank in the order of the graph: [["ffn_gate_exps", "ffn_up_exps", …]]',
    )
    gating: Gating = "softmax"
    has: list[Trait] = []
    replaces: str | None = Field(default=None, strict=True)
    notes: str = Field(default="", strict=True)
    cannot: str = Field(default="", strict=True)


_TOP = "a key of a file of rows, each written as [[arch]]"


class _RowFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    arch: list[TomlRow] = Field(description="rows, each as [[arch]]")


def read_rows(path: str) -> list[ArchRow]:
    """The rows of a TOML file of ``[[arch]]`` tables. Raises PluginError with every problem in it."""
    rows, problems = gather_rows(path)
    if problems:
        raise PluginError("\n".join(problems))
    return rows


def gather_rows(path: str) -> tuple[list[ArchRow], list[str]]:
    """As :func:`read_rows`, but what is wrong comes second.

    A row that is wrong only claims its name, if it has one, so that a name that is taken is found in the same run; a
    row without experts is such a claim.
    """
    label = one_line(path)
    try:
        data = read_toml(Path(path), path)
    except ProfileError as exc:
        return [], [str(exc)]
    problems: dict[tuple[str, ...], str] = {}
    try:
        _RowFile.model_validate(data)
    except ValidationError as exc:
        problems = explain(exc, _RowFile, data, lambda p: f"{label}: {dotted(p)}", top=_TOP)
    tables = data.get("arch")
    rows: list[ArchRow] = []
    for index, table in enumerate(tables if isinstance(tables, list) else ()):
        at = ("arch", str(index))
        if not any(path[:2] == at for path in problems):
            row = make_row(TomlRow.model_validate(table))
            wrong = row_problem(row)
            if not wrong:
                rows.append(row)
                continue
            problems[at] = f"{label}: {wrong}"
        if isinstance(table, dict):
            if "name" not in table:
                what = TomlRow.model_fields["name"].description
                problems.setdefault((*at, "name"), f"{label}: {dotted((*at, 'name'))} is missing; give the {what}")
            rows += _claim(table)
    return rows, list(problems.values())


def make_row(table: TomlRow) -> ArchRow:
    """The row of a table."""
    fields: dict[str, Any] = table.model_dump()
    fields |= {"experts": tuple(tuple(bank) for bank in table.experts), "has": tuple(table.has)}
    return ArchRow(**fields)


def _claim(table: Mapping[str, Any]) -> list[ArchRow]:
    name, replaces = table.get("name"), table.get("replaces")
    if not isinstance(name, str) or not name or not isinstance(replaces, str | None):
        return []
    return [ArchRow(name, (), replaces=replaces)]


def row_problem(row: object) -> str:
    """Why ``row`` is no usable architecture row, or "" if it is."""
    if not isinstance(row, ArchRow):
        return f"returned {one_line(repr(row))[:60]}, which is no ArchRow; return bmoe.contracts.ArchRow(…)"
    if not isinstance(row.name, str) or not row.name:
        return f"has a row named {toml_value(row.name)}; name it as the gguf's general.architecture"
    banks = row.experts
    if not isinstance(banks, tuple) or not banks or not all(isinstance(b, tuple) and b for b in banks):
        return f'row "{row.name}": experts is not a list of lists of names, one per bank; give at least one'
    names = [suffix for bank in banks for suffix in bank]
    if not all(isinstance(suffix, str) and suffix for suffix in names):
        return f'row "{row.name}": an expert tensor suffix is not text; write names such as "ffn_up_exps"'
    if len(set(names)) < len(names):
        return f'row "{row.name}": an expert tensor is listed twice; list each once'
    unknown = [trait for trait in row.has if trait not in get_args(Trait)]
    if unknown:
        known = suggest(unknown[0], get_args(Trait))
        return f'row "{row.name}": has {toml_value(unknown[0])}, which is not known; {known}'
    if row.gating not in get_args(Gating):
        known = suggest(row.gating, get_args(Gating))
        return f'row "{row.name}": gating = {toml_value(row.gating)} is not known; {known}'
    return ""


def merge_rows(
    in_tree: Iterable[Sourced], others: Iterable[Sourced], place: Callable[[str], str] = str
) -> tuple[dict[str, Sourced], list[str]]:
    """Rows by name, and the problems: a name that is taken twice, ``replaces`` that replaces nothing.

    ``place`` turns where a row comes from into words.
    A row from outside may take an in-tree row's name if ``replaces`` says that name; two of them may not.
    A row without experts only claims its name.
    """
    problems: list[str] = []
    base: dict[str, Sourced] = {}
    for origin, row in in_tree:
        if row.name in base:
            problems.append(_twice(row.name, place(base[row.name][0]), place(origin)))
        base.setdefault(row.name, (origin, row))
    merged = dict(base)
    for origin, row in others:
        taken = merged.get(row.name)
        if row.replaces is not None and (row.replaces != row.name or row.name not in base):
            problems.append(_replaces_nothing(place(origin), row, base))
        elif taken is not None and taken is not base.get(row.name):
            problems.append(_twice(row.name, place(taken[0]), place(origin)))
        elif taken is not None and row.replaces is None:
            problems.append(
                f'arch "{row.name}" is provided by {place(taken[0])} and {place(origin)}; '
                f'to take its place, say replaces = "{row.name}" in the second'
            )
        elif row.experts:
            merged[row.name] = (origin, row)
    return merged, problems


def _twice(name: str, first: str, second: str) -> str:
    return f'arch "{name}" is provided by {first} and {second}; remove one'


def _replaces_nothing(origin: str, row: ArchRow, base: Mapping[str, Sourced]) -> str:
    said = f'{origin}: arch "{row.name}": replaces = {toml_value(row.replaces)}'
    if row.replaces in base:
        return f'{said} is not its own name; name the row "{row.replaces}" or leave replaces out'
    return f"{said} is no row of bmoe; {suggest(row.replaces, base)}, or leave replaces out"
