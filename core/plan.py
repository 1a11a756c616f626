"""What will run: profile, providers, model and machine resolved into one Plan, or every reason why they cannot.

Nothing is ignored in silence: what the schema knows but this version does not drive is refused, and what "auto" became
is in :meth:`Plan.resolved`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from bmoe.budget import BudgetOutcome, CacheBudget, decide_budget, size_budget
from bmoe.contracts import ArchRow, Facts, FetchFacts, ModelFacts, Options, Provider
from bmoe.errors import ProfileError
from bmoe.machine import Machine
from bmoe.plugins import Catalog, installed_plugins
from bmoe.problems import cause, explain, one_line, suggest, toml_value
from bmoe.profile import Profile
from bmoe.registry import AUTO
from bmoe.selection import Selection, selections, unknown_name

_UNDRIVEN_KINDS = ("prefetch", "draft", "routing")


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided: which plugins with which options, and every size that was "auto".

    ``budget`` is 0 bytes when nothing is cached (``cache`` then names a policy that is not used). ``direct`` is what
    is asked for; whether a file granted it, its fetcher knows.
    """

    profile: Profile
    facts: ModelFacts
    row: ArchRow
    cache: Choice
    fetch: Choice
    dense: Choice
    sinks: tuple[Choice, ...]
    routing: tuple[Choice, ...]
    prefetch: Choice | None
    draft: Choice | None
    budget: CacheBudget
    threads: int
    ctx: int
    ubatch: int
    lanes: int
    direct: bool
    overlap: str
    notices: tuple[str, ...]
    origins: Mapping[str, str]
    experimental: bool

    @property
    def streaming(self) -> bool:
        """Whether experts are read on demand; False = plain llama.cpp."""
        return self.profile.stream.enabled

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All chosen plugins."""
        speculative = tuple(choice for choice in (self.prefetch, self.draft) if choice is not None)
        return (self.cache, self.fetch, self.dense, *speculative, *self.routing, *self.sinks)

    @property
    def lossy(self) -> bool:
        """Whether a chosen plugin may change the output."""
        return any(choice.provider.lossy for choice in self.choices)

    def facts_for_build(self) -> Facts:
        """What every ``Provider.build`` is told."""
        return _build_facts(self.profile, self.facts, self.budget, self.ubatch)

    def resolved(self) -> dict[str, Any]:
        """The whole plan in plain JSON types, for the run record."""
        model, budget = self.profile.model, self.budget
        return {
            "profile": self.profile.source,
            "model": self.facts.path,
            "arch": self.row.name,
            "arch_origin": self.origins.get(f"arch:{self.row.name}"),
            "streaming": self.streaming,
            "threads": self.threads,
            "ctx": self.ctx,
            "ubatch": self.ubatch,
            "kv_type": model.kv_type,
            "flash_attention": model.flash_attention,
            "repack": model.repack,
            "overlap": self.overlap,
            "cache": {
                **self._shown(self.cache),
                "budget_requested": budget.requested,
                "budget_bytes": budget.bytes,
                "capacity": budget.capacity,
                "cycle": budget.cycle,
                "cycle_bytes": budget.cycle_bytes,
                "used": self.streaming and budget.bytes > 0,
            },
            "fetch": {**self._shown(self.fetch), "lanes": self.lanes, "direct": self.direct, "used": self.streaming},
            "dense": self._shown(self.dense),
            "prefetch": self._shown(self.prefetch) if self.prefetch else None,
            "draft": self._shown(self.draft) if self.draft else None,
            "routing": [self._shown(choice) for choice in self.routing],
            "sinks": [self._shown(choice) for choice in self.sinks],
            "sampling": self.profile.sampling.model_dump(mode="json"),
            "lossy": self.lossy,
            "experimental": self.experimental,
            "notices": list(self.notices),
        }

    def _shown(self, choice: Choice) -> dict[str, Any]:
        options = to_jsonable_python(choice.options.model_dump(), fallback=str, inf_nan_mode="null")
        origin = self.origins.get(choice.label)
        return {"name": choice.name, "origin": origin, "lossy": choice.provider.lossy, "options": options}


def make_plan(profile: Profile, catalog: Catalog, facts: ModelFacts, machine: Machine) -> Plan:
    """Resolve every choice. Raises :class:`~bmoe.errors.ProfileError` with every reason why this cannot run."""
    planner = _Planner(profile, catalog)
    plan = planner.plan(facts, machine)
    if plan is not None:
        planner.problems += [f"{profile.source}: {reason}" for reason in catalog.check_plan(plan)]
    if plan is None or planner.problems:
        raise ProfileError(list(dict.fromkeys(planner.problems)))
    return plan


def check_choices(profile: Profile, catalog: Catalog) -> None:
    """Check what needs no model: names, options, conflicts. Raises ProfileError with every problem."""
    planner = _Planner(profile, catalog)
    planner.choices("")
    if planner.problems:
        raise ProfileError(list(dict.fromkeys(planner.problems)))


class _Planner:
    """Resolves one plan and gathers problems and notices on the way."""

    def __init__(self, profile: Profile, catalog: Catalog) -> None:
        self.profile, self.catalog = profile, catalog
        self.problems: list[str] = []
        self.notices: list[str] = []

    def problem(self, path: str, rest: str) -> None:
        self.problems.append(f"{self.profile.where(path)}{rest}")

    def choices(self, arch: str) -> list[Choice] | None:
        """Every choice for a model of architecture ``arch`` ("" if there is no model); None if one cannot be made."""
        self.problems += undriven(self.profile)
        self._settings()
        wanted = [s for s in selections(self.profile) if s.kind not in _UNDRIVEN_KINDS]
        named = [None if s.name == "auto" else self._choose(s, s.name) for s in wanted]
        fixed = [choice for choice in named if choice is not None]
        labels = [*([f"arch:{arch}"] if arch else []), *(choice.label for choice in fixed)]
        chosen = [
            self._automatic(selection, fixed, labels) if selection.name == "auto" else choice
            for selection, choice in zip(wanted, named, strict=True)
        ]
        made = [choice for choice in chosen if choice is not None]
        self.problems += conflicts(made, arch, self.profile.where)
        return made if len(made) == len(wanted) else None

    def plan(self, facts: ModelFacts, machine: Machine) -> Plan | None:
        profile, model = self.profile, self.profile.model
        row = self.catalog.archs.get(facts.arch)
        if row is None:
            remedy = suggest(facts.arch, self.catalog.archs)
            self.problem("model.path", f": architecture {toml_value(facts.arch)} has no row; {remedy}")
        else:
            self._allow("arch", row.name, "model.path", "architecture ")
        chosen = self.choices(facts.arch)
        if model.ctx > facts.n_ctx_train > 0:
            self.notices.append(f"model.ctx is {model.ctx}, but the model was trained for {facts.n_ctx_train}")
        if row is None or chosen is None:
            return None
        by_kind = {choice.kind: choice for choice in chosen if choice.kind != "sink"}
        budget = self._budget(by_kind["cache"], facts, machine)
        keys = [("arch", row.name), *((choice.kind, choice.name) for choice in chosen)]
        return Plan(
            profile=profile,
            facts=facts,
            row=row,
            cache=by_kind["cache"],
            fetch=by_kind["fetch"],
            dense=by_kind["dense"],
            sinks=tuple(choice for choice in chosen if choice.kind == "sink"),
            routing=(),
            prefetch=None,
            draft=None,
            budget=budget,
            threads=machine.cpus if model.threads == "auto" else model.threads,
            ctx=model.ctx,
            ubatch=min(model.ubatch, model.ctx),
            lanes=profile.fetch.lanes,
            direct=profile.fetch.direct,
            overlap="off" if profile.stream.overlap == "auto" else profile.stream.overlap,
            notices=tuple(self.notices),
            origins={f"{kind}:{name}": self.catalog.origin(kind, name) for kind, name in keys},
            experimental=any(self.catalog.is_experimental(kind, name) for kind, name in keys),
        )

    def _settings(self) -> None:
        """What the model section cannot mean together with the rest."""
        model = self.profile.model
        if model.repack and self.profile.stream.enabled:
            self.problem(
                "model.repack",
                " = true cannot be streamed: repacked weights are other bytes; set stream.enabled = false",
            )
        if model.kv_type == "q8_0" and model.flash_attention is False:
            self.problem("model.kv_type", ' = "q8_0" needs flash attention; set model.flash_attention = "auto"')

    def _allow(self, kind: str, name: str, path: str, said: str = "") -> None:
        if self.catalog.is_experimental(kind, name) and not self.profile.plugins.allow_experimental:
            remedy = "set plugins.allow_experimental = true to try it"
            self.problem(path, f"{': ' + said if said else ' = '}{toml_value(name)} is experimental; {remedy}")

    def _choose(self, selection: Selection, name: str) -> Choice | None:
        """The provider called ``name`` with its options; None, and the reason among the problems, if it cannot be."""
        kind, path = selection.kind, selection.path
        provider = self.catalog.providers[kind].get(name)
        if provider is None:
            known = self.catalog.known[kind]
            self.problems.append(unknown_name(self.profile, selection, known, installed_plugins()))
            return None
        self._allow(kind, name, path)
        reason = _unavailable(provider)
        if reason and (kind != "fetch" or self.profile.stream.enabled):
            self.problem(path, f" = {toml_value(name)} cannot run here: {reason}; choose another, or leave it out")
        options = self._options(selection, provider)
        return None if options is None else Choice(kind, name, provider, options, path)

    def _options(self, selection: Selection, provider: Provider[Any]) -> Options | None:
        prefix = tuple(selection.options_path.split("."))
        model, given = provider.options, dict(selection.options)
        try:
            return model.model_validate(given)
        except ValidationError as exc:
            self.problems += explain(exc, model, given, self.profile.where, prefix)
        except Exception as exc:  # noqa: BLE001 - a plugin's validator may raise anything
            self.problem(
                selection.options_path,
                f" = {toml_value(given)} cannot be checked by {selection.kind} {toml_value(provider.name)}; "
                f"correct the value or the plugin ({cause(exc)})",
            )
        return None

    def _automatic(self, selection: Selection, named: list[Choice], labels: list[str]) -> Choice | None:
        """The first candidate that this machine and the ``named`` choices allow."""
        kind = selection.kind
        if kind not in AUTO:
            self.problem(selection.path, f' = "auto" is not possible; {suggest("auto", self.catalog.known[kind])}')
            return None
        rejected: list[str] = []
        for name in AUTO[kind]:
            provider = self.catalog.providers[kind].get(name)
            if provider is None:
                continue
            reason = _unavailable(provider) or _clash(provider, f"{kind}:{name}", named, labels)
            if self.catalog.is_experimental(kind, name) and not self.profile.plugins.allow_experimental:
                reason = reason or "it is experimental"
            if not reason or not self.profile.stream.enabled:
                return self._choose(selection, name)
            rejected.append(f"{name}: {reason}")
        tried = "; ".join(rejected) or "none is installed"
        self.problem(selection.path, f' = "auto" finds nothing that can run here ({tried}); name another plugin')
        return None

    def _budget(self, cache: Choice, facts: ModelFacts, machine: Machine) -> CacheBudget:
        section = self.profile.cache
        if not self.profile.stream.enabled:
            return size_budget(0, section.budget_mb, facts, machine.page_bytes)

        def below_cycle(budget: CacheBudget) -> bool:
            try:
                built = cache.provider.build(
                    cache.options, _build_facts(self.profile, facts, budget, self.profile.model.ubatch)
                )
            except Exception as exc:  # noqa: BLE001 - a plugin's build may raise anything
                self.problem(cache.path, f" = {toml_value(cache.name)} cannot be built; correct it ({cause(exc)})")
                return True
            return bool(getattr(built, "below_cycle", False))

        outcome: BudgetOutcome = decide_budget(section, cache.name, facts, machine, below_cycle)
        if outcome.problem:
            key, _, rest = outcome.problem.partition(" = ")
            self.problem(key, f" = {rest}")
        if outcome.notice:
            self.notices.append(outcome.notice)
        return outcome.budget


def _build_facts(profile: Profile, model: ModelFacts, budget: CacheBudget, ubatch: int) -> Facts:
    tokens = min(ubatch, profile.model.ctx)
    batch = max((min(b.n_expert, tokens * b.n_used) * len(b.projections) for b in model.banks), default=0)
    paths = tuple(shard.path for shard in model.shards)
    fetch = FetchFacts(paths, profile.fetch.lanes, profile.fetch.direct, batch)
    return Facts(model, budget.facts(profile.sampling.seed or 0), fetch)


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


def conflicts(chosen: list[Choice], arch: str, where: Callable[[str], str]) -> list[str]:
    """The combinations that cannot run, each once, from what the chosen plugins declare that they need and exclude."""
    problems: list[str] = []
    seen: set[frozenset[str]] = set()
    labels = [*([(f"arch:{arch}", "model.path")] if arch else []), *((choice.label, choice.path) for choice in chosen)]
    for choice in chosen:
        said = f"{where(choice.path)} = {toml_value(choice.name)}"
        problems += [
            f"{said} needs {pattern}; choose it, or another {choice.kind} plugin"
            for pattern in choice.provider.needs
            if (arch or not pattern.startswith("arch:"))
            and not any(_matches(pattern, label) for label, path in labels if path != choice.path)
        ]
        for pattern in choice.provider.excludes:
            for label, path in labels:
                pair = frozenset((choice.path, path))
                if path != choice.path and pair not in seen and _matches(pattern, label):
                    seen.add(pair)
                    other = f"{path} = {toml_value(label.partition(':')[2])}" if path != "model.path" else label
                    problems.append(f"{said} cannot run with {other}; change one of them")
    return problems


def undriven(profile: Profile) -> list[str]:
    """What ``profile`` asks for that its schema knows but this version of bmoe does not do yet, one line each."""
    return [
        f"{profile.where(path)} = {toml_value(value)} is not supported by this version; {remedy}"
        for path, value, remedy in _undriven(profile)
    ]


def _undriven(profile: Profile) -> Iterator[tuple[str, object, str]]:
    out = "leave it out"
    if profile.stream.overlap in ("projection", "expert"):
        yield "stream.overlap", profile.stream.overlap, 'set "auto" or "off"'
    if profile.cache.heat is not None:
        yield "cache.heat", profile.cache.heat, out
    if profile.fetch.roots:
        yield "fetch.roots", list(profile.fetch.roots), out
    for section in ("prefetch", "draft", "loss"):
        table = getattr(profile, section)
        if table is not None:
            yield section, table.model_dump(), f"leave [{section}] out"
    for index, knob in enumerate(profile.routing):
        yield f"routing.{index}.plugin", knob.plugin, "leave [[routing]] out"
    for section in ("trace", "chat", "serve"):
        table = getattr(profile, section)
        for key, info in type(table).model_fields.items():
            if getattr(table, key) != info.default:
                yield f"{section}.{key}", getattr(table, key), out
