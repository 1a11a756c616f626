"""What is in the tree: the pydantic model of registry.toml, the architectures and the index of bmoe's own plugins.

An architecture is a row of its own, all that is known of it. Of a plugin it says where a name lives, how stable it is
and which gates it passes; how a plugin behaves is said in its code alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bmoe.contracts import ArchRow
from bmoe.errors import PluginError, ProfileError
from bmoe.problems import dotted, explain
from bmoe.rows import TomlRow, make_row, row_problem
from bmoe.tables import read_toml

Kind = Literal["arch", "cache", "fetch", "prefetch", "dense", "routing", "importance", "draft", "sink"]
KINDS: tuple[Kind, ...] = ("arch", "cache", "fetch", "prefetch", "dense", "routing", "importance", "draft", "sink")

AUTO: Mapping[str, tuple[str, ...]] = {
    "cache": ("next-use", "router-ema", "decay", "s3fifo", "lfu", "edgemoe", "lru"),
    "fetch": ("aio", "uring", "pread"),
}
"""What "auto" tries, best first, per kind."""


class Row(BaseModel):
    """One in-tree plugin: ``module`` provides ``name`` of ``kind``; ``gates`` are the test classes that it passes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Kind = Field(description="kind of the plugin")
    name: str = Field(description="name that a profile says", min_length=1)
    module: str = Field(description="module that provides it", pattern=r"^bmoe_plugins(\.[a-z][a-z0-9_]*)+$")
    stability: Literal["stable", "experimental"] = Field(description='stability: "stable" or "experimental"')
    gates: list[str] = Field(default=[], description="names of gate classes")
    docs: str = Field(description="page that documents it", min_length=1)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    arch: list[TomlRow] = []
    plugin: list[Row] = []


class Registry(BaseModel):
    """Architectures and plugins, in the order of the file; no two plugins have the same kind and name."""

    model_config = ConfigDict(frozen=True)

    archs: tuple[ArchRow, ...] = ()
    rows: tuple[Row, ...] = ()

    def find(self, kind: str, name: str) -> Row | None:
        """The row of this kind and name, if there is one."""
        return next((r for r in self.rows if r.kind == kind and r.name == name), None)

    def names(self, kind: str) -> tuple[str, ...]:
        """The names of one kind."""
        return tuple(r.name for r in self.rows if r.kind == kind)


def load_registry() -> Registry:
    """The registry that is installed beside the in-tree plugins. Raises PluginError with every problem in it."""
    with as_file(files("bmoe_plugins") / "registry.toml") as path:
        return read_registry(path)


def read_registry(path: Path) -> Registry:
    """The registry in the file ``path``. Raises PluginError with every problem in it."""
    try:
        return parse_registry(read_toml(path, path.name), path.name)
    except ProfileError as exc:
        raise PluginError(str(exc)) from exc


def parse_registry(data: Mapping[str, Any], label: str = "registry.toml") -> Registry:
    """The registry in a table that was read. Raises PluginError with every problem in it."""
    problems: list[str] = []
    table = _File()
    try:
        table = _File.model_validate(dict(data))
    except ValidationError as exc:
        problems = list(
            explain(exc, _File, data, lambda path: f"{label}: {dotted(path)}", top="a key of a registry").values()
        )
    first: dict[tuple[str, str], Row] = {}
    archs = tuple(make_row(arch) for arch in table.arch)
    problems += [f"{label}: {wrong}" for wrong in map(row_problem, archs) if wrong]
    for row in table.plugin:
        taken = first.setdefault((row.kind, row.name), row)
        if taken is not row:
            problems.append(
                f'{label}: {row.kind} "{row.name}" is listed twice, as {taken.module} and {row.module}; remove one'
            )
    if problems:
        raise PluginError("\n".join(problems))
    return Registry(archs=archs, rows=tuple(table.plugin))
