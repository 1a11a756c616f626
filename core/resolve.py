"""From a profile as it is written to a plan, in one pass: whatever is wrong on the way is reported together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bmoe.bundled import find_model
from bmoe.contracts import ModelFacts
from bmoe.errors import ModelError, ProfileError
from bmoe.layout import read_model
from bmoe.machine import read_machine
from bmoe.plan import Plan
from bmoe.planner import try_plan
from bmoe.plugins import gather_plugins
from bmoe.problems import Problem
from bmoe.profile import Profile, read_profile
from bmoe.registry import load_registry


def resolve(
    profile: str | Path | Mapping[str, Any] | Profile,
    *,
    model: str | None = None,
    overrides: Sequence[str] = (),
    remember: Path | None = None,
) -> Plan:
    """The plan of a profile, a model and this machine; the arguments are those of :func:`~bmoe.profile.load_profile`.

    ``remember`` is the file that keeps what was measured before, for what is "auto"; None to keep nothing.

    Raises :class:`~bmoe.errors.ProfileError` with every problem of the profile and its plugins, a lacking model
    included; PluginError if only plugins are wrong; ModelError if nothing else is wrong and the model cannot be used.
    """
    _, plan = check(profile, model=model, overrides=overrides, needs_model=True, remember=remember)
    assert plan is not None
    return plan


def check(
    profile: str | Path | Mapping[str, Any] | Profile,
    *,
    model: str | None = None,
    overrides: Sequence[str] = (),
    needs_model: bool = False,
    remember: Path | None = None,
) -> tuple[Profile, Plan | None]:
    """The profile and its plan; None for a plan if the profile names no model and it ``needs`` none.

    Raises what :func:`resolve` does.
    """
    chosen = read_profile(profile, model=model, overrides=overrides)
    catalog = gather_plugins(chosen, load_registry())
    problems = chosen.refused
    facts: ModelFacts | None = None
    unusable: ModelError | None = None
    if chosen.model.path is not None:
        try:
            facts = read_model(find_model(chosen.model.path), catalog.archs)
        except ModelError as exc:
            unusable = exc
    elif needs_model and not chosen.in_doubt("model.path"):
        remedy = "give the model with --model FILE (in Python model=FILE), or set model.path"
        line = f"{chosen.where('model.path')} is missing; {remedy}"
        problems.append(Problem(("model", "path"), line))
    plan, found = try_plan(chosen, catalog, facts, read_machine(), remember)
    problems += found
    if problems:
        problems += [Problem(("plugins", "enable"), line) for line in catalog.problems]
        raise ProfileError(chosen.in_order(problems))
    catalog.refuse()
    if unusable is not None:
        raise unusable
    return chosen, plan
