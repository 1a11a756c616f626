"""Reads data sets: JSON lines in one of three formats, checked line by line before a model is opened."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from bmoe.bundled import suggest_set
from bmoe.errors import BmoeError
from bmoe.evaluate.grading import final_number

KEYS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "choice": ("question", "choices", "answer"),
    "gsm8k": ("question", "answer"),
}
"""The keys that a line of each format must have."""


class DatasetError(BmoeError):
    """A data set cannot be used; names file, line, key and what is wanted."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Text:
    """A document. ``line`` counts from 1; ``id`` is the line's own ``id``, or else its number."""

    line: int
    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A question with ``choices``, of which number ``answer`` (from 0) is right."""

    line: int
    id: str
    question: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A question that a number answers."""

    line: int
    id: str
    question: str
    answer: Decimal


Item = Text | Choice | Problem


@dataclass(frozen=True, slots=True)
class Dataset:
    """The items of a file in its order; ``sha256`` is that of the whole file."""

    path: str
    format: str
    sha256: str
    items: tuple[Item, ...]


def read_dataset(path: str | Path, format_: str | None = None, limit: int | None = None) -> Dataset:
    """The first ``limit`` items of a file of JSON lines; blank lines are no items, later ones are not looked at.

    Without a format, the keys of the first line tell it. Raises :class:`DatasetError` in one line.
    """
    name = str(path)
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise DatasetError(f"{name}: no such file; {suggest_set(name)}") from None
    except IsADirectoryError:
        raise DatasetError(f"{name}: is a directory; name a file of JSON lines in it") from None
    except OSError as error:
        raise DatasetError(f"{name}: {error.strerror or error}") from error
    items: list[Item] = []
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if limit is not None and len(items) == limit:
            break
        if not raw.strip():
            continue
        line = _Line(f"{name}: line {number}", _record(f"{name}: line {number}", raw))
        if format_ is None:
            format_ = line.format()
        items.append(_READERS[format_](line, number))
    if not items or format_ is None:
        raise DatasetError(f"{name}: holds no item; give at least one line of JSON ({_wanted()})")
    return Dataset(name, format_, hashlib.sha256(data).hexdigest(), tuple(items))


def _record(where: str, raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{where}: is not UTF-8 (byte 0x{raw[error.start]:02x}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
        raise DatasetError(f"{where}: is not JSON ({reason}); every line is one JSON object") from error
    except (RecursionError, ValueError) as error:
        raise DatasetError(f"{where}: is not JSON that can be read; every line is one JSON object") from error
    if not isinstance(record, dict):
        raise DatasetError(f"{where}: is not a JSON object but {_kind(record)}; every line is one JSON object")
    return record


class _Line:
    """One line while it is read: takes values out by key, or says which is wrong."""

    def __init__(self, where: str, record: dict[str, Any]) -> None:
        self._where, self._record = where, record

    def format(self) -> str:
        found = next((name for name in ("choice", "gsm8k", "text") if self._fits(name)), None)
        if found is None:
            raise DatasetError(f"{self._where}: has {self._keys()}, which fits no format ({_wanted()})")
        return found

    def value(self, key: str, format_: str) -> Any:
        if key in self._record:
            return self._record[key]
        advice = f"{format_} needs {', '.join(KEYS[format_])}"
        others = [name for name in KEYS if name != format_ and self._fits(name)]
        close = difflib.get_close_matches(key, list(self._record), n=1)
        if others:
            advice += f"; did you mean --format {others[0]}?"
        elif close:
            advice += f'; did you mean the key "{close[0]}"?'
        raise DatasetError(f'{self._where}: has no "{key}" but {self._keys()}; {advice}')

    def text(self, key: str, format_: str) -> str:
        return self.checked(self.value(key, format_), key)

    def checked(self, value: object, key: str) -> str:
        if not isinstance(value, str) or not value.strip():
            self.refuse(key, f"is {_kind(value)}; it has to be text that is not empty")
        try:
            value.encode()
        except UnicodeEncodeError:
            self.refuse(key, "has half of a surrogate pair, which is no text")
        return value

    def id(self, number: int) -> str:
        given = self._record.get("id")
        return str(given) if isinstance(given, (str, int)) and not isinstance(given, bool) else str(number)

    def refuse(self, key: str, what: str) -> NoReturn:
        raise DatasetError(f'{self._where}: "{key}" {what}')

    def _fits(self, format_: str) -> bool:
        return all(key in self._record for key in KEYS[format_])

    def _keys(self) -> str:
        return f"the keys {', '.join(self._record)}" if self._record else "no keys"


def _text(line: _Line, number: int) -> Text:
    return Text(number, line.id(number), line.text("text", "text"))


def _choice(line: _Line, number: int) -> Choice:
    question, given = line.text("question", "choice"), line.value("choices", "choice")
    if not isinstance(given, list) or len(given) < 2:
        line.refuse("choices", f"is {_kind(given)}; it has to be a list of at least two texts")
    choices = tuple(line.checked(each, "choices") for each in given)
    answer = line.value("answer", "choice")
    index = answer
    if isinstance(answer, str) and len(answer) == 1 and answer.isascii() and answer.isalpha():
        index = ord(answer.upper()) - ord("A")
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(choices):
        last = chr(ord("A") + min(len(choices), 26) - 1)
        wanted = f"it has to be an index 0 to {len(choices) - 1} or a letter A to {last}"
        line.refuse("answer", f"is {json.dumps(answer)[:40]}; {wanted}")
    return Choice(number, line.id(number), question, choices, index)


def _problem(line: _Line, number: int) -> Problem:
    question, answer = line.text("question", "gsm8k"), line.value("answer", "gsm8k")
    found: Decimal | None = None
    if isinstance(answer, str) and "####" in answer:
        found = final_number(answer[answer.rindex("####") :])
    elif isinstance(answer, str):
        found = final_number(answer) if len(answer.split()) == 1 else None
    elif isinstance(answer, (int, float)) and not isinstance(answer, bool) and math.isfinite(answer):
        found = Decimal(str(answer))
    if found is None:
        line.refuse("answer", f"is {json.dumps(answer)[:40]}; it has to end in #### and a number, or be a number")
    return Problem(number, line.id(number), question, found)


_READERS: Mapping[str, Callable[[_Line, int], Item]] = {"text": _text, "choice": _choice, "gsm8k": _problem}


def _wanted() -> str:
    return "; ".join(f"{name}: {', '.join(keys)}" for name, keys in KEYS.items())


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, str):
        return "text" if value.strip() else "empty text"
    return f"a list of {len(list(value))}" if isinstance(value, Iterable) else "a number"
