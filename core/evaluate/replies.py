"""The file that keeps every reply: one JSON object a line, written as each is finished, so that a run can go on later.

A *session* line says what ran and under which key; the *item* lines after it are its replies.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from bmoe.contracts import ModelFacts
from bmoe.evaluate.datasets import Dataset, DatasetError
from bmoe.plan import Plan
from bmoe.telemetry import SCHEMA, versions

_NO_MATTER = frozenset({"sink", "serve", "trace", "sampling"})
_SAMPLES, _SAMPLE_BYTES = 16, 4096


class RepliesError(DatasetError):
    """A file of replies cannot be written, or does not belong to this run; names the file and the remedy."""


def run_key(plan: Plan, dataset: Dataset, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for two replies to belong together: data, model, profile, settings and versions."""
    profile = {k: v for k, v in plan.profile.model_dump(mode="json").items() if k not in _NO_MATTER}
    profile["model"] = {key: value for key, value in profile["model"].items() if key != "path"}
    found = versions()
    return {
        "dataset": dataset.sha256,
        "format": dataset.format,
        "model": fingerprint(plan.facts),
        "profile": profile,
        "settings": dict(settings),
        "versions": {name: found[name] for name in ("bmoe", "llama-cpp-python")},
    }


def fingerprint(facts: ModelFacts) -> str:
    """SHA-256 of a model's headers, its sizes and a few pages of its data; all of it would take minutes to read."""
    first: dict[int, int] = {}
    places = [(t.shard, t.offset) for t in facts.dense]
    places += [(p.shard, p.offset) for bank in (*facts.banks, *facts.nextn_banks) for p in bank.projections]
    for shard, offset in places:
        first[shard] = min(offset, first.get(shard, offset))
    digest = hashlib.sha256()
    for index, shard_facts in enumerate(facts.shards):
        begins = first.get(index, 0)
        step = max(1, (shard_facts.nbytes - begins) // _SAMPLES)
        digest.update(f"{shard_facts.nbytes} {begins}\n".encode())
        with open(shard_facts.path, "rb") as file:
            digest.update(file.read(begins))
            for offset in range(begins, shard_facts.nbytes, step):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


class Replies:
    """What is done of a run, by line of the data set, and where the rest goes. ``sessions`` are its run records."""

    def __init__(
        self, path: str | Path, key: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
    ) -> None:
        """Read what is there; nothing is written yet. Raises :class:`RepliesError` in one line."""
        self.path, self._key = Path(path), key
        self.done: dict[int, dict[str, Any]] = {}
        self.sessions: list[dict[str, Any]] = []
        self._file: IO[bytes] | None = None
        self._keep = 0
        if self.path.is_dir() or not os.access(self.path if self.path.exists() else self.path.parent, os.W_OK):
            raise RepliesError(f"{path}: cannot be written; name another file with --out")
        if overwrite or not self.path.exists() or not self.path.stat().st_size:
            return
        if not resume:
            raise RepliesError(
                f"{path}: exists; --resume goes on with it, --overwrite replaces it, --out names another"
            )
        self._read()

    def __enter__(self) -> Replies:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def begin(self, run: Mapping[str, Any]) -> None:
        """Start a session, after what is there already."""
        try:
            self._file = self.path.open("ab")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(self._keep)
        except BlockingIOError:
            raise RepliesError(f"{self.path}: another run is writing it; name another file with --out") from None
        except OSError as error:
            raise RepliesError(f"{self.path}: {error.strerror or error}") from error
        self.sessions.append(dict(run))
        self._write({"event": "session", "schema": SCHEMA, "key": self._key, "run": run})

    def add(self, line: int, reply: dict[str, Any]) -> None:
        """Keep a finished reply."""
        self.done[line] = reply
        self._write({"event": "item", "schema": SCHEMA, **reply})

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._file is not None, "no session has begun"
        try:
            self._file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            self._file.flush()
        except OSError as error:
            raise RepliesError(f"{self.path}: {error.strerror or error}") from error

    def _read(self) -> None:
        data = self.path.read_bytes()
        self._keep = data.rfind(b"\n") + 1  # what comes after was being written when the run ended
        for number, raw in enumerate(data[: self._keep].splitlines(), start=1):
            try:
                record = json.loads(raw)
                event = record["event"]
                if event == "session":
                    self._compare(record["key"])
                    self.sessions.append(record["run"])
                elif event == "item" and self.sessions:
                    self.done[int(record["line"])] = {k: v for k, v in record.items() if k not in ("event", "schema")}
                else:
                    raise ValueError(event)
            except (ValueError, KeyError, TypeError) as error:
                what = f"{self.path}: line {number} is no reply of bmoe eval"
                raise RepliesError(f"{what}; --overwrite replaces the file, --out names another") from error

    def _compare(self, key: Mapping[str, Any]) -> None:
        theirs, ours = dict(_flat(key)), dict(_flat(json.loads(json.dumps(self._key))))
        names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        if names:
            shown = [_difference(name, theirs.get(name), ours.get(name)) for name in names[:3]]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            what = f"{self.path}: was made with another {', '.join(shown)}{more}"
            raise RepliesError(f"{what}; --overwrite replaces it, --out names another file")


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _difference(name: str, theirs: object, ours: object) -> str:
    if name in ("dataset", "model"):
        return name  # their hashes would tell nobody anything
    return f"{name.removeprefix('profile.').removeprefix('settings.')} ({json.dumps(theirs)}, now {json.dumps(ours)})"
