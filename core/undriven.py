"""What the schema of a profile knows and this version does not do: refused, so that nothing is ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator

from bmoe.problems import toml_value
from bmoe.profile import Profile


def undriven(profile: Profile) -> list[str]:
    """What ``profile`` asks for that its schema knows but this version of bmoe does not do yet, one line each."""
    return [f"{profile.where(path)}{not_yet(value, remedy)}" for path, value, remedy in demands(profile)]


def not_yet(value: object, remedy: str) -> str:
    """The rest of such a line, after the place."""
    return f" = {toml_value(value)} is not supported by this version; {remedy}"


def demands(profile: Profile) -> Iterator[tuple[str, object, str]]:
    """TOML path, value and remedy of each."""
    out = "leave it out"
    if profile.stream.overlap == "expert":
        yield "stream.overlap", profile.stream.overlap, 'it was no faster when tried; set "auto", "projection" or "off"'
    for section in ("chat", "serve"):
        table = getattr(profile, section)
        for key, info in type(table).model_fields.items():
            if getattr(table, key) != info.default:
                yield f"{section}.{key}", getattr(table, key), out
