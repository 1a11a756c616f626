"""How a problem reads: one line with file, TOML path, value, what is wrong and the remedy; never pydantic's dump."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

Path = tuple[str, ...]


class Problem(NamedTuple):
    """One line about what stands at ``path``."""

    path: Path
    line: str


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_QUOTED = re.compile(r"'([^']*)'")
_LONGEST = 60


def one_line(text: object) -> str:
    """``text`` as one printable line: runs of white space become a blank, other odd characters are escaped."""
    joined = " ".join(str(text).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in joined)


def cause(exc: BaseException) -> str:
    """An exception in one line, with its type."""
    return f"{type(exc).__name__}: {one_line(exc)}" if str(exc) else type(exc).__name__


def toml_value(value: object) -> str:
    """``value`` as it would be written in TOML, shortened to fit a line."""
    text = _toml(value, 3)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _toml(value: object, depth: int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        quoted = json.dumps(value[: 2 * _LONGEST], ensure_ascii=False)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in quoted)
    if isinstance(value, int) and value.bit_length() > 1024:
        return "a number of many digits"
    if isinstance(value, Mapping):
        inner = "…" if depth == 0 else ", ".join(f"{_key(k)} = {_toml(v, depth - 1)}" for k, v in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        inner = "…" if depth == 0 else ", ".join(_toml(v, depth - 1) for v in value[:_LONGEST])
        return f"[{inner}]"
    return one_line(value)


def _key(part: object) -> str:
    text = str(part)
    return text if _BARE_KEY.match(text) else toml_value(text)


def dotted(path: Iterable[object]) -> str:
    """A TOML path as it would be written: ``routing.0.options.k``, odd keys quoted."""
    return ".".join(_key(p) for p in path)


def suggest(word: object, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the nearest known one if there is any, then all of them."""
    names = sorted(set(known))
    if not names:
        return "there are none to choose from"
    near = difflib.get_close_matches(str(word)[:64].lower(), names, n=1)
    listed = ", ".join(names)
    return f'did you mean "{near[0]}"? ({listed})' if near else f"choose one of {listed}"


def explain(
    error: ValidationError,
    model: type[BaseModel],
    data: object,
    where: Callable[[Path], str],
    prefix: Path = (),
    top: str = "a section of a profile",
) -> dict[Path, str]:
    """Every problem that pydantic found in ``data`` for ``model``: one line for each whole TOML path.

    ``where`` turns a whole TOML path into ``FILE: a.b.c``; ``prefix`` is the path of ``data`` itself; ``top`` says in
    words what its keys are.
    """
    found: dict[Path, list[str]] = {}
    items = error.errors(include_url=False)
    # A key that was misspelt is not missing as well.
    misspelt = {meant(tuple(map(str, item["loc"])), model) for item in items if item["type"] == "extra_forbidden"}
    for item in items:
        loc, value = _walk(data, item["loc"], keep_last=item["type"] == "missing")
        missing = item["type"] == "missing"
        if missing and loc in misspelt:
            continue
        reason = _reason(item, model, loc, prefix, top)
        found.setdefault(loc, []).append(reason if missing else f"= {toml_value(value)} {reason}")
    # The members of a union each have a reason of their own; the first stands for them.
    return {prefix + loc: f"{where(prefix + loc)} {reasons[0]}" for loc, reasons in found.items()}


def _walk(data: object, loc: Sequence[int | str], *, keep_last: bool) -> tuple[Path, object]:
    """The part of a location that exists in the data (pydantic adds names of union members), and its value."""
    path: list[str] = []
    for index, part in enumerate(loc):
        if isinstance(data, Mapping):
            present = part in data
        else:
            present = isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        if present:
            data = cast("Any", data)[part]
        elif not (keep_last and index == len(loc) - 1):
            continue
        path.append(str(part))
    return tuple(path), data


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    # Python 3.10 takes tuple[int] for a class.
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for arg in get_args(annotation):
        yield from _models_in(arg)


def _table(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The model that describes the table at ``path``."""
    at: type[BaseModel] | None = model
    for part in path:
        if at is None or part.isdecimal():
            continue
        info = at.model_fields.get(part)
        at = next(_models_in(info.annotation), None) if info else None
    return at


_TYPES = {
    "int": ("is not a whole number", "give a whole number"),
    "float": ("is not a number", "give a number"),
    "bool": ("is not true or false", "write true or false without quotes"),
    "string": ("is not text", "put it in quotes"),
    "model": ("is not a table", "write it as a table of keys"),
    "dict": ("is not a table", "write it as a table of keys"),
    "list": ("is not a list", "write it in [ ]"),
    "tuple": ("is not a list", "write it in [ ]"),
    "set": ("is not a list", "write it in [ ]"),
    "finite": ("is not finite", "give a finite number"),
}
_BOUNDS = {
    "greater_than": ("is too small", "give more than {gt}"),
    "greater_than_equal": ("is too small", "give at least {ge}"),
    "less_than": ("is too large", "give less than {lt}"),
    "less_than_equal": ("is too large", "give at most {le}"),
}


def _reason(item: Any, model: type[BaseModel], loc: Path, prefix: Path, top: str) -> str:
    """What is wrong at ``loc``, and the remedy."""
    kind, context = str(item["type"]), item.get("ctx", {})
    last = loc[-1] if loc else ""
    parent = _table(model, loc[:-1]) if loc else None
    info = parent.model_fields.get(last) if parent else None
    if kind == "missing":
        return f"is missing; give {f'the {info.description}' if info and info.description else 'it a value'}"
    if kind == "extra_forbidden":
        section = dotted(prefix + loc[:-1])
        of = f"a key of [{section}]" if section else top
        return f"is not {of}; {_known_key(loc, model, parent)}"
    if kind in ("value_error", "assertion_error"):
        return one_line(context.get("error", item["msg"]))
    if kind in ("literal_error", "enum"):
        return f"is not a choice here; {suggest(item['input'], re.findall(_QUOTED, context['expected']))}"
    if kind in _BOUNDS:
        wrong, remedy = _BOUNDS[kind]
        return f"{wrong}; {remedy.format(**context)}"
    if kind.split("_", maxsplit=1)[0] in _TYPES:
        wrong, remedy = _TYPES[kind.split("_", maxsplit=1)[0]]
        if wrong == "is not a list" and info and next(_models_in(info.annotation), None):
            remedy = f"write each as [[{dotted(prefix + loc)}]]"
        elif wrong == "is not a table" and len(prefix + loc) == 1:
            remedy = f"write [{last}] and its keys below it"
        return f"{wrong}; {remedy}"
    return f"is refused: {one_line(item['msg'])}; correct it"


def meant(loc: Path, model: type[BaseModel]) -> Path | None:
    """The key that an unknown one at ``loc`` seems to stand for: of nearly its name, or its namesake elsewhere."""
    parent = _table(model, loc[:-1])
    if parent is None or loc[-1] in parent.model_fields:
        return None
    near = difflib.get_close_matches(loc[-1][:64].lower(), parent.model_fields, n=1)
    if near:
        return (*loc[:-1], near[0])
    for section, info in model.model_fields.items():
        if any(loc[-1] in table.model_fields for table in _models_in(info.annotation) if table is not parent):
            return (section, loc[-1])
    return None


def _known_key(loc: Path, model: type[BaseModel], parent: type[BaseModel] | None) -> str:
    at = meant(loc, model)
    if at is not None and at[-1] == loc[-1]:
        listed = get_origin(model.model_fields[at[0]].annotation) in (list, tuple)
        return f"it belongs to [[{at[0]}]]" if listed else f"it belongs to [{at[0]}]"
    known = list(parent.model_fields) if parent else []
    return suggest(loc[-1], known) if known else "remove it: no key is known here"
