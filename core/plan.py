"""What will run: profile, providers, model and machine resolved into one Plan, or every reason why they cannot.

Nothing is ignored in silence: what the schema knows but this version does not drive is refused, and what "auto" became
is in :meth:`Plan.resolved`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from bmoe.budget import BudgetOutcome, CacheBudget, decide_budget, size_budget
from bmoe.choices import Choice, Chooser
from bmoe.contracts import ArchRow, Facts, FetchFacts, ModelFacts
from bmoe.errors import PluginError, ProfileError
from bmoe.machine import Machine
from bmoe.plugins import Catalog
from bmoe.problems import Problem, cause, suggest, toml_value
from bmoe.profile import Profile

_KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}
_NO_MODEL = ModelFacts("", "", "", (), 0, 0, 0, 0, 0, 0, 0, (), ())


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
    plan, problems = try_plan(profile, catalog, facts, machine)
    if plan is None or problems:
        raise ProfileError(profile.in_order(problems))
    return plan


def try_plan(
    profile: Profile, catalog: Catalog, facts: ModelFacts | None, machine: Machine
) -> tuple[Plan | None, list[Problem]]:
    """The plan, if there can be one, and every reason why this cannot run.

    Without a model (``facts`` is None) there is no plan, and no reason that only a model could give. What follows from
    a value that was refused while loading is no reason. Raises :class:`~bmoe.errors.PluginError` if nothing is wrong
    but that a plugin cannot check the plan.
    """
    planner = _Planner(profile, catalog)
    plan, problems = planner.plan(facts, machine), planner.problems
    if plan is not None and not profile.refused:
        try:
            problems += [Problem((), f"{profile.source}: {reason}") for reason in catalog.check_plan(plan)]
        except PluginError as exc:
            if not (problems or catalog.problems):
                raise
            problems.append(Problem((), str(exc)))
    return plan, problems


class _Planner(Chooser):
    """Resolves one plan and gathers problems and notices on the way."""

    def __init__(self, profile: Profile, catalog: Catalog) -> None:
        super().__init__(profile, catalog)
        self.notices: list[str] = []

    def plan(self, given: ModelFacts | None, machine: Machine) -> Plan | None:
        """The plan for a model, or None if a choice is lacking or there is no model."""
        profile, model, facts = self.profile, self.profile.model, given or _NO_MODEL
        row = self.catalog.archs.get(facts.arch)
        if row is not None:
            self.allow("arch", row.name, "model.path", "architecture ")
        elif given is not None:
            remedy = suggest(facts.arch, self.catalog.archs)
            self.problem("model.path", f": architecture {toml_value(facts.arch)} has no row; {remedy}")
        self._settings()
        chosen = self.choices(facts.arch)
        if row is not None and "denoising" in row.has:
            reason = "fills in masked tokens: what bmoe generates, token after token, says little"
            self.notices.append(f"architecture {row.name} {reason}")
        if model.ctx > facts.n_ctx_train > 0:
            self.notices.append(f"model.ctx is {model.ctx}, but the model was trained for {facts.n_ctx_train}")
        need, free = kv_bytes(profile, facts), machine.available_bytes
        if free is not None and need > free:
            most = free * model.ctx // need
            sizes = f"{need >> 20} MiB for the KV of a conversation, and {free >> 20} are free"
            self.problem("model.ctx", f" = {model.ctx} needs {sizes}; give at most {most}")
        by_kind = {choice.kind: choice for choice in chosen if choice.kind != "sink"}
        budget = self._budget(by_kind.get("cache"), facts, self._unheld(by_kind.get("dense"), facts, machine))
        if row is None or self.unsure:
            return None
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
        """What no version can do, or not this one."""
        for path, value, remedy in _undriven(self.profile):
            self.problem(path, _not_yet(value, remedy))
        model = self.profile.model
        if model.repack and self.profile.stream.enabled:
            self.problem(
                "model.repack",
                " = true cannot be streamed: repacked weights are other bytes; set stream.enabled = false",
                "stream.enabled",
            )
        if model.kv_type == "q8_0" and model.flash_attention is False:
            self.problem("model.kv_type", ' = "q8_0" needs flash attention; set model.flash_attention = "auto"')

    def _unheld(self, dense: Choice | None, facts: ModelFacts, machine: Machine) -> Machine:
        """The machine once the KV of a conversation and what the dense placement holds are taken."""
        held = kv_bytes(self.profile, facts)
        if dense is not None and "dense" not in self.unsure and self.profile.stream.enabled:
            try:
                held += dense.provider.holds(dense.options, facts)
            except Exception as exc:  # noqa: BLE001 - a plugin may raise anything
                why = f"cannot tell what it holds; correct its options or the plugin ({cause(exc)})"
                self.problem(dense.path, f" = {toml_value(dense.name)} {why}")
        if machine.available_bytes is None:
            return machine
        return dataclasses.replace(machine, available_bytes=max(0, machine.available_bytes - held))

    def _budget(self, cache: Choice | None, facts: ModelFacts, machine: Machine) -> CacheBudget:
        section = self.profile.cache
        if not self.profile.stream.enabled:
            return size_budget(0, section.budget_mb, facts, machine.page_bytes)

        def below_cycle(budget: CacheBudget) -> bool:
            if cache is None or "cache" in self.unsure:
                return True
            try:
                built = cache.provider.build(
                    cache.options, _build_facts(self.profile, facts, budget, self.profile.model.ubatch)
                )
            except Exception as exc:  # noqa: BLE001 - a plugin's build may raise anything
                self.problem(cache.path, f" = {toml_value(cache.name)} cannot be built; correct it ({cause(exc)})")
                return True
            return bool(getattr(built, "below_cycle", False))

        outcome: BudgetOutcome = decide_budget(section, cache.name if cache else "", facts, machine, below_cycle)
        if outcome.problem:
            key, _, rest = outcome.problem.partition(" = ")
            self.problem(key, f" = {rest}", "stream.enabled")
        if outcome.notice:
            self.notices.append(outcome.notice)
        return outcome.budget


def kv_bytes(profile: Profile, facts: ModelFacts) -> int:
    """Bytes of one conversation's KV; 0 if the model does not say."""
    return int(facts.kv_elements * profile.model.ctx * _KV_BYTES[profile.model.kv_type])


def _build_facts(profile: Profile, model: ModelFacts, budget: CacheBudget, ubatch: int) -> Facts:
    tokens = min(ubatch, profile.model.ctx)
    batch = max((min(b.n_expert, tokens * b.n_used) * len(b.projections) for b in model.banks), default=0)
    paths = tuple(shard.path for shard in model.shards)
    fetch = FetchFacts(paths, profile.fetch.lanes, profile.fetch.direct, batch)
    return Facts(model, budget.facts(profile.sampling.seed or 0), fetch)


def undriven(profile: Profile) -> list[str]:
    """What ``profile`` asks for that its schema knows but this version of bmoe does not do yet, one line each."""
    return [f"{profile.where(path)}{_not_yet(value, remedy)}" for path, value, remedy in _undriven(profile)]


def _not_yet(value: object, remedy: str) -> str:
    return f" = {toml_value(value)} is not supported by this version; {remedy}"


def _undriven(profile: Profile) -> Iterator[tuple[str, object, str]]:
    out = "leave it out"
    if profile.stream.overlap == "expert":
        yield "stream.overlap", profile.stream.overlap, 'set "auto", "projection" or "off"'
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
