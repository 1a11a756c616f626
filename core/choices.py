"""Which provider with which options stands for each name of a profile, and which of them do not go together."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from bmoe.contracts import Options, Provider
from bmoe.errors import PluginError
from bmoe.plugins import Catalog, installed_plugins
from bmoe.problems import Problem, cause, dotted, explain, one_line, suggest, toml_value
from bmoe.profile import Profile
from bmoe.registry import AUTO, KINDS
from bmoe.selection import Selection, selections, unknown_name


@dataclass(frozen=True, slots=True)
class Choice:
    """One chosen plugin: its provider, its validated options, and the TOML path that chose it."""

    kind: str
    name: str
    provider: Provider[Any]
    options: Options
    path: str

    @property
    def label(self) -> str:
        """``kind:name``, as ``needs`` and ``excludes`` say it."""
        return f"{self.kind}:{self.name}"

    @property
    def options_path(self) -> str:
        """The TOML path of its table of options."""
        return f"{self.path}_options" if self.kind == "importance" else f"{self.path.rpartition('.')[0]}.options"


class Chooser:
    """Makes every choice of a profile and gathers the problems on the way.

    ``unsure`` are the kinds of which a choice is lacking or has wrong options: what depends on them is not judged.
    """

    def __init__(self, profile: Profile, catalog: Catalog) -> None:
        self.profile, self.catalog = profile, catalog
        self.problems: list[Problem] = []
        self.unsure = {str(kind) for kind in KINDS if profile.in_doubt(str(kind))}

    def problem(self, path: str, rest: str, *depends: str) -> None:
        """Something is wrong at ``path``, unless its value, or one that this ``depends`` on, was refused before."""
        if not any(self.profile.in_doubt(each) for each in (path, *depends)):
            self.problems.append(Problem(tuple(path.split(".")), f"{self.profile.where(path)}{rest}"))

    def choices(self, arch: str) -> list[Choice]:
        """Every choice that can be made for a model of architecture ``arch`` ("" if there is no model)."""
        self.unsure |= {s.kind for s in selections(self.profile) if self.profile.in_doubt(s.path)}
        wanted = [s for s in selections(self.profile) if not self.profile.in_doubt(s.path)]
        named = [None if s.name == "auto" else self._choose(s, s.name) for s in wanted]
        fixed = [choice for choice in named if choice is not None]
        labels = [*([f"arch:{arch}"] if arch else []), *(choice.label for choice in fixed)]
        chosen = [
            self._automatic(selection, fixed, labels) if selection.name == "auto" else choice
            for selection, choice in zip(wanted, named, strict=True)
        ]
        made = [choice for choice in chosen if choice is not None]
        self.problems += conflicts(made, arch, self.profile.where, self.unsure)
        self.problems += _scorers_apart(made, self.profile.where)
        return made

    def allow(self, kind: str, name: str, path: str, said: str = "") -> None:
        """Record a problem if ``name`` is experimental and the profile does not allow that."""
        setting = "plugins.allow_experimental"
        if self.catalog.is_experimental(kind, name) and not self.profile.plugins.allow_experimental:
            rest = f"{toml_value(name)} is experimental; set {setting} = true to try it"
            self.problem(path, f"{': ' + said if said else ' = '}{rest}", setting)

    def prefer(self, kind: str, names: list[str]) -> str:
        """Which of several that can run "auto" becomes; they are in the order of :data:`AUTO`."""
        return names[0]

    def _choose(self, selection: Selection, name: str) -> Choice | None:
        """The provider called ``name`` with its options; None, and the reason among the problems, if it cannot be."""
        kind, path = selection.kind, selection.path
        provider = self.catalog.providers[kind].get(name)
        if provider is None:
            self._unknown(selection)
            return None
        self.allow(kind, name, path)
        reason = _unavailable(provider)
        if reason and (kind != "fetch" or self.profile.stream.enabled):
            rest = f" = {toml_value(name)} cannot run here: {reason}; choose another, or leave it out"
            self.problem(path, rest, *(("stream.enabled",) if kind == "fetch" else ()))
        return Choice(kind, name, provider, self._options(selection, provider), path)

    def _unknown(self, selection: Selection) -> None:
        self.unsure.add(selection.kind)
        plugin, dot, _ = selection.name.partition(".")
        known = self.catalog.known[selection.kind]
        lost = plugin in self.catalog.failed or self.profile.in_doubt("plugins.enable") if dot else False
        # What should have provided it and could not be loaded is a problem already.
        if not lost and selection.name not in known:
            line = unknown_name(self.profile, selection, known, installed_plugins())
            self.problems.append(Problem(tuple(selection.path.split(".")), line))

    def _options(self, selection: Selection, provider: Provider[Any]) -> Options:
        """The options that ``selection`` gives; an empty stand-in where they are wrong, which is a problem."""
        prefix = tuple(selection.options_path.split("."))
        model, given = provider.options, dict(selection.options)
        try:
            return model.model_validate(given)
        except ValidationError as exc:
            found = explain(exc, model, given, lambda at: self._blamed(at, selection), prefix)
            self.problems += [Problem(at, line) for at, line in found.items() if not self.profile.in_doubt(at)]
        except Exception as exc:  # noqa: BLE001 - a plugin's validator may raise anything
            self.problem(
                selection.options_path,
                f" = {toml_value(given)} cannot be checked by {selection.kind} {toml_value(provider.name)}; "
                f"correct the value or the plugin ({cause(exc)})",
            )
        self.unsure.add(selection.kind)
        return Options()

    def _blamed(self, at: tuple[str, ...], selection: Selection) -> str:
        """``FILE: a.b.c`` for a problem of an option; what nobody says is the matter of who chose the plugin."""
        origin, prefix = self.profile.origin, tuple(selection.options_path.split("."))
        said = len(at) == len(prefix) or at[len(prefix)] in selection.options
        if said or origin.giver(at) != origin.source:
            return self.profile.where(at)
        return f"{origin.giver(tuple(selection.path.split('.')))}: {dotted(at)}"

    def _automatic(self, selection: Selection, named: list[Choice], labels: list[str]) -> Choice | None:
        """A candidate that this machine and the ``named`` choices allow; which, :meth:`prefer` says."""
        kind = selection.kind
        if kind not in AUTO:
            self.problem(selection.path, f' = "auto" is not possible; {suggest("auto", self.catalog.known[kind])}')
            self.unsure.add(kind)
            return None
        rejected: list[str] = []
        possible: list[str] = []
        for name in AUTO[kind]:
            provider = self.catalog.providers[kind].get(name)
            if provider is None:
                continue
            reason = _unavailable(provider) or _clash(provider, f"{kind}:{name}", named, labels)
            if self.catalog.is_experimental(kind, name) and not self.profile.plugins.allow_experimental:
                reason = reason or "it is experimental"
            if not reason or not self.profile.stream.enabled:
                possible.append(name)
            else:
                rejected.append(f"{name}: {reason}")
        if possible:
            return self._choose(selection, self.prefer(kind, possible))
        tried = "; ".join(rejected) or "none is installed"
        rest = f' = "auto" finds nothing that can run here ({tried}); name another plugin'
        self.problem(selection.path, rest, "stream.enabled", "plugins.allow_experimental")
        self.unsure.add(kind)
        return None


def _unavailable(provider: Provider[Any]) -> str:
    try:
        return one_line(provider.available())
    except Exception as exc:  # noqa: BLE001 - a plugin that cannot even say so is not available
        return f"it cannot tell ({cause(exc)})"


def _matches(pattern: str, label: str) -> bool:
    return pattern == label or (pattern.endswith(":*") and label.startswith(pattern[:-1]))


def _clash(provider: Provider[Any], label: str, others: list[Choice], labels: list[str]) -> str:
    """Why ``provider`` does not go with what the profile names, or ""."""
    for pattern in provider.excludes:
        if any(_matches(pattern, other) for other in labels):
            return f"it cannot run with {pattern}"
    for other in others:
        if any(_matches(pattern, label) for pattern in other.provider.excludes):
            return f"{other.label} cannot run with it"
        if any(p.startswith(label.partition(":")[0] + ":") and not _matches(p, label) for p in other.provider.needs):
            return f"{other.label} needs another"
    return ""


def _scorers_apart(chosen: list[Choice], where: Callable[[str], str]) -> list[Problem]:
    """A prompt is scored once: routing policies that name another scorer, or other options, than the first one."""
    scorers = [choice for choice in chosen if choice.kind == "importance"]
    return [
        Problem(
            tuple(other.path.split(".")),
            f"{where(other.path)} = {toml_value(other.name)} is not the scorer of {scorers[0].path}, or has other "
            "options; a prompt is scored once: name the same with the same options",
        )
        for other in scorers[1:]
        if (other.name, other.options) != (scorers[0].name, scorers[0].options)
    ]


def conflicts(
    chosen: list[Choice], arch: str, where: Callable[[str], str], unsure: Collection[str] = ()
) -> list[Problem]:
    """The combinations that cannot run, each once, from what the chosen plugins declare that they need and exclude.

    What they need of a kind in ``unsure`` counts as met.
    """
    problems: list[Problem] = []
    open_kinds = {*unsure, *(() if arch else ("arch",))}
    seen: set[frozenset[str]] = set()
    labels = [*([(f"arch:{arch}", "model.path")] if arch else []), *((choice.label, choice.path) for choice in chosen)]
    for choice in chosen:
        said, at = f"{where(choice.path)} = {toml_value(choice.name)}", tuple(choice.path.split("."))
        problems += [
            Problem(at, f"{said} needs {pattern}; choose it, or another {choice.kind} plugin")
            for pattern in choice.provider.needs
            if pattern.partition(":")[0] not in open_kinds
            and not any(_matches(pattern, label) for label, path in labels if path != choice.path)
        ]
        for pattern in choice.provider.excludes:
            for label, path in labels:
                pair = frozenset((choice.path, path))
                if path != choice.path and pair not in seen and _matches(pattern, label):
                    seen.add(pair)
                    other = f"{path} = {toml_value(label.partition(':')[2])}" if path != "model.path" else label
                    problems.append(Problem(at, f"{said} cannot run with {other}; change one of them"))
    return problems


def chosen_at(profile: Profile, choice: Choice) -> str:
    """``FILE: a.b.c = "NAME"``: the start of a message about a chosen plugin."""
    return f"{profile.where(choice.path)} = {toml_value(choice.name)}"


def of_option(profile: Profile, choice: Choice, exc: PluginError) -> str:
    """The message of an error that starts with "options.KEY", with the place of that option; "" of any other."""
    option, blank, rest = str(exc).partition(" ")
    if not option.startswith("options."):
        return ""
    place = f"{choice.options_path}.{option.removeprefix('options.')}"
    return f"{profile.where(place)}{blank}{one_line(rest)}"
