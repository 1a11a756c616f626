"""``bmoe profile``: check, show, list and make profiles, without opening a model."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bmoe.cli.arguments import Parser, UsageError, add_profile_arguments, choose
from bmoe.cli.folders import fetch_memory
from bmoe.cli.output import emit, emit_json, emit_table
from bmoe.errors import BmoeError, ModelError, ProfileError
from bmoe.plan import Plan
from bmoe.profile import bundled_profiles, load_profile, read_profile
from bmoe.resolve import check
from bmoe.telemetry import SCHEMA

EXAMPLE = "bmoe profile check my.toml --model model.gguf"
_UNITS = {"_bytes": 1, "_mb": 1024 * 1024}
_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")


def main(arguments: Sequence[str]) -> int:
    """Run ``check``, ``show``, ``list`` or ``make``."""
    actions: dict[str, Callable[[Sequence[str]], int]] = {
        "check": _check,
        "show": _show,
        "list": _list,
        "make": _make,
    }
    if not arguments:
        raise UsageError(f"profile needs one of {', '.join(actions)}; example: {EXAMPLE}")
    if arguments[0] in ("-h", "--help"):
        parser = Parser(
            "bmoe profile", "Check, show, list or make profiles: bmoe profile check|show|list|make --help", EXAMPLE
        )
        parser.print_help()
        return 0
    return actions[choose(arguments[0], actions, "command of profile")](arguments[1:])


def _check(arguments: Sequence[str]) -> int:
    parser = Parser(
        "bmoe profile check",
        "Report every problem of a profile, without opening a model. If a model is given, by the profile or with\n"
        "--model, its header is read and the whole plan is checked.",
        EXAMPLE,
    )
    parsed = _parse(parser, arguments)
    try:
        profile, plan = check(parsed.profile, model=parsed.model, overrides=parsed.overrides, remember=fetch_memory())
    except BmoeError as error:
        if parsed.json:
            _report(_source(parsed), str(error).splitlines(), None)
        raise
    if parsed.json:
        _report(profile.source, [], plan)
        return 0
    if plan is None:
        emit(f"{profile.source}: no problem found; give --model to check it together with a model\n")
        return 0
    emit(f"{profile.source}: no problem found with {plan.facts.path}\n\n")
    resolved = plan.resolved()
    if not resolved["notices"]:
        del resolved["notices"]
    emit("\n".join(toml_lines(resolved)) + "\n")
    return 0


def _report(source: str, problems: Sequence[str], plan: Plan | None) -> None:
    resolved = plan.resolved() if plan is not None else None
    emit_json({"schema": SCHEMA, "profile": source, "problems": problems, "resolved": resolved}, indent=2)


def _source(parsed: argparse.Namespace) -> str:
    """What messages call the profile: as given where it cannot even be read."""
    try:
        return read_profile(parsed.profile).source
    except ProfileError:
        return str(parsed.profile)


def _show(arguments: Sequence[str]) -> int:
    parser = Parser(
        "bmoe profile show",
        "Print a whole profile, defaults and --set included, as TOML that can be loaded again. Its problems are\n"
        "those that check reports.",
        "bmoe profile show demo --set cache.budget_mb=48",
    )
    parsed = _parse(parser, arguments)
    try:
        profile, _ = check(parsed.profile, model=parsed.model, overrides=parsed.overrides, remember=fetch_memory())
    except ModelError:  # of the model, not of the profile
        profile = load_profile(parsed.profile, model=parsed.model, overrides=parsed.overrides)
    values = profile.model_dump(mode="json")
    if parsed.json:
        emit_json({"schema": SCHEMA, "name": profile.source, "profile": values}, indent=2)
    else:
        emit("\n".join(toml_lines(values)) + "\n")
    return 0


def _list(arguments: Sequence[str]) -> int:
    parser = Parser("bmoe profile list", "List the profiles that come with bmoe.", "bmoe profile list")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse(arguments)
    found = {name: first_comment(path) for name, path in bundled_profiles().items()}
    if parsed.json:
        emit_json({"schema": SCHEMA, "profiles": [{"name": n, "description": d} for n, d in found.items()]}, indent=2)
    else:
        emit_table(("profile", "description"), list(found.items()))
    return 0


def _make(arguments: Sequence[str]) -> int:
    from bmoe.cli.profile_make import make

    return make(arguments)


def _parse(parser: Parser, arguments: Sequence[str]) -> Any:
    parser.add_argument("profile", metavar="NAME|PATH", help="a profile file, or the name of a bundled one")
    add_profile_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse(arguments)


def first_comment(path: Path) -> str:
    """The comment lines at the head of a profile, as one line; they describe it."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").strip())
    return " ".join(lines)


def toml_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """The TOML lines of plain data, first what is in no section; what is unset is a comment, since TOML has no null."""
    single = {key: value for key, value in values.items() if value not in (None, []) and not _is_section(value)}
    yield from _entries(single)
    if single:
        yield ""
    for section, table in values.items():
        if table is None or table == []:
            yield f"# {section} is not set\n"
        elif section not in single:
            for item in table if isinstance(table, list) else [table]:
                yield f"[[{section}]]" if isinstance(table, list) else f"[{section}]"
                yield from _entries(item)
                yield ""


def _is_section(value: object) -> bool:
    return all(isinstance(item, Mapping) for item in (value if isinstance(value, list) else [value]))


def _entries(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield f"# {key} is not set" if value is None else f"{_key(key)} = {_toml(value)}{_size(key, value)}"


def _size(key: str, value: object) -> str:
    """A size in the unit that a person would choose, as a comment; empty if there is none to add."""
    unit = next((unit for end, unit in _UNITS.items() if key.endswith(end)), 0)
    if not isinstance(value, int | float) or value < 1024 or not unit:
        return ""
    size, names = value * unit / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(names) > 1:
        size, names = size / 1024, names[1:]
    return f"  # {f'{size:.1f}'.removesuffix('.0')} {names[0]}"


def _key(key: str) -> str:
    return key if _BARE.match(key) else json.dumps(key)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        given = {key: item for key, item in value.items() if item is not None}
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in given.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return repr(value)  # TOML reads 1e+20 as Python writes it, and nan and inf are no profile's values
    return json.dumps(value)
