"""What is compared: sides, made from profiles and from the values that are varied."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bmoe.errors import ModelError, PluginError, ProfileError
from bmoe.resolve import check

MOST_SIDES = 26
"""As many as there are letters to name them in a report."""


@dataclass(frozen=True)
class Side:
    """One setting: ``label`` names it to a person, ``varied`` are those of its ``overrides`` that tell it apart."""

    label: str
    profile: str
    model: str | None = None
    overrides: tuple[str, ...] = ()
    varied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Vary:
    """One key of a profile and the values that it takes in turn, as they were written."""

    key: str
    values: tuple[str, ...]


def parse_vary(text: str) -> Vary:
    """``KEY=V1,V2,…`` as a key and its values; commas inside brackets, braces and quotes belong to a value.

    Raises :class:`ProfileError` in one line.
    """
    key, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in _split(rest))
    if not key.strip() or not equals or not all(values):
        raise ProfileError(f"--vary {text}: is not KEY=VALUE,VALUE; write --vary cache.budget_mb=500,1000")
    if len(set(values)) < len(values):
        raise ProfileError(f"--vary {text}: has a value twice; give each once")
    return Vary(key.strip(), values)


def make_sides(
    profiles: Sequence[str], *, model: str | None = None, overrides: Sequence[str] = (), vary: Sequence[Vary] = ()
) -> list[Side]:
    """Every profile with every combination of the varied values, in the order given; the first is the baseline.

    A label has what differs: the profile if there are several, the varied values. Raises :class:`ProfileError` if there
    are more sides than can be named.
    """
    choices = [[f"{each.key}={value}" for value in each.values] for each in vary]
    sides: list[Side] = []
    taken: dict[str, int] = {}
    for profile in profiles:
        for varied in itertools.product(*choices):
            parts = [profile] if len(profiles) > 1 or not varied else []
            label = " ".join([*parts, *varied])
            taken[label] = taken.get(label, 0) + 1
            again = f" ({taken[label]})" if taken[label] > 1 else ""
            sides.append(Side(label + again, profile, model, (*overrides, *varied), varied))
    if len(sides) > MOST_SIDES:
        raise ProfileError(f"{len(sides)} sides are more than can be compared; give at most {MOST_SIDES}")
    return sides


def refuse_wrong(sides: Sequence[Side], remember: Path | None = None) -> None:
    """Raise :class:`ProfileError` with every problem of every side's profile and plan, before anything is measured.

    A model that cannot be used is no problem of a profile: such a side fails when its turn comes, and others do not.
    ``remember`` is that of :func:`~bmoe.resolve.resolve`.
    """
    problems: list[str] = []
    for side in sides:
        try:
            check(side.profile, model=side.model, overrides=side.overrides, needs_model=True, remember=remember)
        except (ProfileError, PluginError) as error:
            found = str(error).splitlines()
            # what all sides share is said once, without a name
            named = len(sides) > 1 and bool(side.varied)
            problems += [f"side {side.label}: {line}" if named else line for line in found]
        except ModelError:
            continue
    if problems:
        raise ProfileError(list(dict.fromkeys(problems)))


def _split(text: str) -> list[str]:
    """``text`` at its commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += char
    return parts
