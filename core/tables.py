"""How TOML files and ``a.b.c=VALUE`` overrides become plain tables; what is not plain TOML is refused."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bmoe.errors import ProfileError
from bmoe.problems import cause, dotted, one_line, toml_value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

Table = dict[str, Any]
Problems = dict[tuple[str, ...], str]
"""What is wrong, by path: one line each."""

_LIMIT_BYTES = 1 << 20
_LIMIT_DEPTH = 24
_LIMIT_BITS = 64


def read_toml(path: Path, name: str) -> Table:
    """The table in the TOML file ``path``; ``name`` is what messages call it. Raises ProfileError in one line."""
    label = one_line(name)
    try:
        with path.open("rb") as file:
            raw = file.read(_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise ProfileError(f"{label}: no such file; check the path") from None
    except IsADirectoryError:
        raise ProfileError(f"{label}: is a directory; name a TOML file in it") from None
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ProfileError(f"{label}: cannot be read ({one_line(reason)}); check the path and its permissions") from exc
    if len(raw) > _LIMIT_BYTES:
        raise ProfileError(f"{label}: is larger than {_LIMIT_BYTES} bytes; name a TOML file, not a model")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise ProfileError(
            f"{label}: is not UTF-8 (byte 0x{raw[exc.start]:02x} at offset {exc.start}); save it as UTF-8 text"
        ) from exc
    return parse_toml(text, label)


def parse_toml(text: str, label: str) -> Table:
    """The table in ``text``. Raises ProfileError naming line and column."""
    try:
        table: Table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        message = one_line(exc)
        at = re.search(r" \(at line (\d+), column (\d+)\)$", message)
        if at:
            line, column = int(at[1]), int(at[2])
        else:
            lines = text.split("\n")
            line, column = len(lines), len(lines[-1]) + 1
        reason = re.sub(r" \(at [^()]*\)$", "", message)
        raise ProfileError(f"{label}: line {line}, column {column}: {reason}; correct the TOML there") from exc
    except (ValueError, RecursionError) as exc:
        # An integer with thousands of digits, or brackets nested thousands deep.
        raise ProfileError(f"{label}: cannot be parsed ({cause(exc)}); simplify it") from exc
    return table


def plain_table(data: Mapping[Any, Any], label: str, problems: Problems) -> Table:
    """A deep copy of ``data`` in plain dicts and lists; what TOML cannot say, or a run record not repeat, is a problem.

    ``None`` counts as absent, so that a dumped profile loads again.
    """
    copy = plain_value(data, (), label, problems)
    return copy if isinstance(copy, dict) else {}


def plain_value(value: Any, path: tuple[str, ...], label: str, problems: Problems) -> Any:
    """What :func:`plain_table` does, for one value at ``path``."""
    if len(path) > _LIMIT_DEPTH:
        problems[path[:3]] = f"{label}: {dotted(path[:3])} is nested more than {_LIMIT_DEPTH} deep; flatten it"
        return None
    if isinstance(value, Mapping):
        table: Table = {}
        for key, item in value.items():
            at = (*path, str(key))
            if not isinstance(key, str) or _broken(key):
                problems[at] = f"{label}: {dotted(at)} is not a key; keys are UTF-8 text"
            elif item is not None:
                table[key] = plain_value(item, at, label, problems)
        return table
    if isinstance(value, list | tuple):
        return [plain_value(item, (*path, str(index)), label, problems) for index, item in enumerate(value)]
    leaf = str(value) if isinstance(value, Path) else value
    wrong = _leaf_problem(leaf)
    if wrong:
        problems[path] = f"{label}: {dotted(path)} = {toml_value(leaf)} {wrong}"
    return leaf


def _leaf_problem(value: object) -> str:
    if isinstance(value, str):
        return "holds bytes that are no UTF-8 text; rename it" if _broken(value) else ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else "is not finite; give a finite number"
    if isinstance(value, int):
        return "is too large for TOML; give at most 64 bits" if value.bit_length() >= _LIMIT_BITS else ""
    return "is neither text, number, true or false, list nor table; put it in quotes"


def _broken(text: str) -> bool:
    """Whether text holds lone surrogates: bytes of a command line that are not UTF-8, which no record can repeat."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split ``a.b.c=VALUE`` into path and value: a TOML value if it is one, else text. Raises ProfileError."""
    key, equals, raw = text.partition("=")
    shown = toml_value(text)
    if not equals:
        raise ProfileError(f"--set {shown}: has no value; write --set a.b.c=VALUE")
    path = _key_path(key)
    if path is None:
        raise ProfileError(f"--set {shown}: {toml_value(key)} is not a TOML path; write --set a.b.c=VALUE")
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return path, raw
    # A line break in the text may open a second key; such a thing is text.
    return path, parsed["value"] if set(parsed) == {"value"} else raw


def _key_path(key: str) -> tuple[str, ...] | None:
    if "\n" in key or "\r" in key:
        return None
    try:
        table: Any = tomllib.loads(f"{key} = true")
    except (ValueError, RecursionError):
        return None
    path: list[str] = []
    while isinstance(table, dict):
        if len(table) != 1:
            return None
        ((part, table),) = table.items()
        path.append(part)
    return tuple(path) if table is True and path else None


def apply_override(data: Table, path: tuple[str, ...], value: Any) -> None:
    """Put ``value`` at ``path`` in ``data``; a list is entered by index and grows by its next. Raises ProfileError."""
    at: Any = data
    for index, part in enumerate(path):
        last = index == len(path) - 1
        here = dotted(path[:index])
        if isinstance(at, dict):
            if last:
                at[part] = value
            elif part not in at:
                at[part] = [] if path[index + 1] == "0" else {}
            at = at[part]
        elif isinstance(at, list):
            if not (part.isascii() and part.isdecimal()) or len(part) > 6:
                raise ProfileError(f"--set: {dotted(path)}: {here} is a list; use an index such as {here}.0")
            place = int(part)
            if place > len(at):
                entries = f"{len(at)} {'entry' if len(at) == 1 else 'entries'}"
                raise ProfileError(f"--set: {dotted(path)}: {here} has {entries}; the next index is {len(at)}")
            if place == len(at):
                at.append({})
            if last:
                at[place] = value
            at = at[place]
        else:
            raise ProfileError(f"--set: {dotted(path)}: {here} = {toml_value(at)} is not a table; set {here} itself")
