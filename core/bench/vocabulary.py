"""Which keys and texts of a profile are bmoe's own, so that they tell nothing of the person who wrote it."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from bmoe.plugins import gather_plugins
from bmoe.profile import Profile
from bmoe.registry import Row, load_registry
from bmoe.tables import parse_override

REMOVED = "(removed)"
"""Stands for a text that is not bmoe's own."""

# fmt: off
RESOLVED = (
    "streaming", "threads", "ctx", "ubatch", "kv_type", "flash_attention", "repack", "overlap", "cache", "fetch",
    "dense", "prefetch", "routing", "lossy", "experimental", "direct_io", "seam", "slot_bytes",
)
# fmt: on
"""The parts of a resolved plan that matter to a figure."""

# fmt: off
_DETAILS = (
    "name", "options", "budget_requested", "budget_bytes", "capacity", "cycle", "cycle_bytes", "room_bytes", "used",
    "lanes", "direct", "placed_bytes", "resident_bytes", "released_bytes", "repacked_bytes",
)
# fmt: on


class Vocabulary:
    """The texts and keys that bmoe's own profiles and plugins have, and what is left of plain data without others."""

    def __init__(self) -> None:
        registry = load_registry()
        self._texts = {row.name for row in registry.rows} | {row.name for row in registry.archs}
        self._texts |= {"auto", "none", "c", "python", *_choices(Profile)}
        self._keys = {*_keys(Profile), *RESOLVED, *_DETAILS, *_option_names(registry.rows)}

    def text(self, value: str) -> str:
        """``value``, or that something was removed."""
        return value if value in self._texts else REMOVED

    def plain(self, value: Any) -> Any:
        """Numbers as they are, texts and keys if they are known; an unknown key goes with its value."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self.plain(item) for key, item in value.items() if key in self._keys}
        if isinstance(value, (list, tuple)):
            return [self.plain(item) for item in value]
        return value if value is None or isinstance(value, (bool, int, float)) else REMOVED

    def numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What of ``values`` is a number; the keys are bmoe's."""
        return {key: value for key, value in values.items() if isinstance(value, (int, float))}

    def override(self, text: str) -> str:
        """A varied ``KEY=VALUE`` with what is known of it."""
        path, value = parse_override(text)
        key = ".".join(part if part in self._keys or part.isdecimal() else REMOVED for part in path)
        shown = self.plain(value)
        return f"{key}={shown if isinstance(shown, (str, int, float)) else REMOVED}"


def _models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """``model`` and the tables inside it."""
    yield model
    for field in model.model_fields.values():
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _models(part)


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in typing.get_args(annotation):
        yield from _parts(part)


def _keys(model: type[BaseModel]) -> Iterator[str]:
    for each in _models(model):
        yield from each.model_fields


def _choices(model: type[BaseModel]) -> Iterator[str]:
    """The texts that a profile may choose among."""
    for each in _models(model):
        for field in each.model_fields.values():
            for part in _parts(field.annotation):
                if typing.get_origin(part) is typing.Literal:
                    yield from (value for value in typing.get_args(part) if isinstance(value, str))


def _option_names(rows: Sequence[Row]) -> Iterator[str]:
    """The options of bmoe's own plugins."""
    catalog = gather_plugins(Profile(), load_registry())
    for row in rows:
        provider = catalog.providers.get(row.kind, {}).get(row.name)
        if provider is not None:
            yield from provider.options.model_fields
