"""Use counts of experts that outlive a run: the file, what may be in it, and how runs are added up.

One JSON object: ``format``, ``schema``, the model (``model`` its name, ``arch``, ``fingerprint``), ``tokens`` and a row
per bank with ``layer``, ``bank``, ``entry_bytes`` and ``counts``, one number per expert. Tokens and counts fade alike:
what was counted :data:`HALF_LIFE` decoded tokens ago counts half.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from bmoe.contracts import ExpertKey, ModelFacts, expert_key
from bmoe.errors import BmoeError
from bmoe.fingerprint import fingerprint

try:
    import fcntl
except ImportError:  # not on every system; then the last of two runs that end at once is the one that counts
    fcntl = None  # type: ignore[assignment]

FORMAT, SCHEMA = "bmoe heat", 1
HALF_LIFE = 4096
_MOST_BYTES = 64 << 20
_MOST = 1e15
_PATIENCE_S = 5.0


class HeatError(BmoeError):
    """A heat file cannot be used; names the file, what is wrong and the remedy. The file is as it was."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Heat:
    """Decoded tokens, and how often they used each entry; both faded. What was never used may be left out."""

    tokens: float = 0.0
    counts: Mapping[ExpertKey, float] = field(default_factory=dict)

    def plus(self, tokens: int, uses: Mapping[ExpertKey, int]) -> Heat:
        """With a run of ``tokens`` more tokens and their uses."""
        fade = 2 ** (-tokens / HALF_LIFE)
        counts = {key: count * fade for key, count in self.counts.items()}
        for key, count in uses.items():
            counts[key] = counts.get(key, 0.0) + count
        return Heat(self.tokens * fade + tokens, counts)

    def chances(self) -> dict[ExpertKey, float]:
        """How often a token used each entry, 0 to 1, the most first; only of those that any used."""
        used = sorted(((count, key) for key, count in self.counts.items() if count > 0), reverse=True)
        return {key: min(1.0, count / self.tokens) for count, key in used} if self.tokens > 0 else {}


def read_heat(path: str, facts: ModelFacts) -> Heat:
    """What the file ``path`` says of the model; nothing counted if there is none yet. Raises :class:`HeatError`."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise HeatError(f"{path}: is not a file; give another")
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return Heat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HeatError(f"{path}: cannot be read ({reason}); give another file") from error
    if len(data) > _MOST_BYTES:
        raise HeatError(f"{path}: is no heat file, for it is too large; give another")
    try:
        table = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HeatError(f"{path}: is no heat file, or damaged ({_short(error)}); remove it, or give another") from error
    return _Reader(path, facts).heat(table)


def add_heat(path: str, facts: ModelFacts, tokens: int, uses: Mapping[ExpertKey, int]) -> None:
    """Add a run to the file ``path``, which is replaced as a whole. Raises :class:`HeatError`; then it is as it was."""
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    with _alone(folder):
        text = _text(read_heat(path, facts).plus(tokens, uses), facts)
        try:
            descriptor, name = tempfile.mkstemp(prefix=os.path.basename(path) + ".", dir=folder)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                os.chmod(name, 0o644)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise HeatError(f"{path}: cannot be written ({error.strerror}); what was there is kept") from error


def unusable(path: str, facts: ModelFacts) -> str:
    """Why a run of the model can neither read ``path`` nor make it, or ""."""
    try:
        read_heat(path, facts)
    except HeatError as error:
        return str(error).removeprefix(f"{path}: ")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        return "is in a folder that does not exist; make it, or give another file"
    return "" if os.access(folder, os.W_OK) else "is in a folder that cannot be written to; give another file"


def _text(heat: Heat, facts: ModelFacts) -> str:
    banks = [
        {
            "layer": bank.layer,
            "bank": bank.bank,
            "entry_bytes": bank.entry_bytes,
            "counts": [
                round(heat.counts.get(expert_key(bank.layer, expert, bank.bank), 0.0), 4)
                for expert in range(bank.n_expert)
            ],
        }
        for bank in facts.banks
    ]
    head = {"format": FORMAT, "schema": SCHEMA, "model": facts.name, "arch": facts.arch}
    return json.dumps({**head, "fingerprint": fingerprint(facts), "tokens": round(heat.tokens, 4), "banks": banks})


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """While no other process adds to a heat file of this folder; after some seconds all the same."""
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                until = time.monotonic() + _PATIENCE_S
                while time.monotonic() < until:
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(0.02)
        yield


class _Reader:
    """Checks a table from a file, from the outside in."""

    def __init__(self, path: str, facts: ModelFacts) -> None:
        self._path, self._facts = path, facts

    def heat(self, table: Any) -> Heat:
        facts = self._facts
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise HeatError(f"{self._path}: is no heat file; give another")
        schema = table.get("schema")
        if schema != SCHEMA or isinstance(schema, bool):
            said = f"has schema {_short(schema)}, and this version of bmoe knows {SCHEMA}"
            raise HeatError(f"{self._path}: {said}; give another file")
        if table.get("fingerprint") != fingerprint(facts):
            theirs, ours = _short(table.get("model")), _short(facts.name)
            also = ", in another form" if theirs == ours else ""
            raise HeatError(
                f"{self._path}: is of another model ({theirs}{also}), not of {facts.path}; give another file"
            )
        rows = table.get("banks")
        if not isinstance(rows, list) or len(rows) != len(facts.banks):
            self._damaged("banks")
        counts: dict[ExpertKey, float] = {}
        for index, (row, bank) in enumerate(zip(rows, facts.banks, strict=True)):
            numbers = row.get("counts") if isinstance(row, dict) else None
            if not isinstance(numbers, list) or len(numbers) != bank.n_expert:
                self._damaged(f"banks[{index}].counts")
            if (row.get("layer"), row.get("bank"), row.get("entry_bytes")) != (bank.layer, bank.bank, bank.entry_bytes):
                self._damaged(f"banks[{index}]")
            for expert, number in enumerate(numbers):
                counts[expert_key(bank.layer, expert, bank.bank)] = self._number(number, f"banks[{index}].counts")
        return Heat(self._number(table.get("tokens"), "tokens"), counts)

    def _number(self, value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
            self._damaged(where)
        number = float(value)
        return number if math.isfinite(number) else self._damaged(where)

    def _damaged(self, where: str) -> NoReturn:
        raise HeatError(f"{self._path}: is damaged ({where}); remove it, or give another file")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _short(value: object) -> str:
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
