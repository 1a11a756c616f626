"""From a profile to a plan: every choice resolved, or every reason why it cannot run.

Nothing is ignored in silence: what the schema knows but this version does not drive is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from bmoe.budget import (
    BudgetOutcome,
    CacheBudget,
    decide_budget,
    size_budget,
    widest_ubatch,
)
from bmoe.choices import Choice, Chooser, chosen_at, of_option
from bmoe.claims import build_facts, claimed, drafting_bytes, kv_bytes
from bmoe.contracts import Facts, Fetcher, ModelFacts
from bmoe.copies import find_copies
from bmoe.draftmodel import read_draft_model
from bmoe.drives import drive_of
from bmoe.errors import ModelError, PluginError, ProfileError
from bmoe.headcheck import no_head
from bmoe.heat import unusable
from bmoe.machine import Machine
from bmoe.plan import Plan
from bmoe.plugins import Catalog
from bmoe.probe import probe
from bmoe.problems import Problem, cause, one_line, suggest, toml_value
from bmoe.profile import Profile
from bmoe.undriven import demands, not_yet
from bmoe.verdicts import best_policy

_NO_MODEL = ModelFacts("", "", "", (), 0, 0, 0, 0, 0, 0, 0, (), ())


def make_plan(
    profile: Profile, catalog: Catalog, facts: ModelFacts, machine: Machine, remember: Path | None = None
) -> Plan:
    """Resolve every choice. Raises :class:`~bmoe.errors.ProfileError` with every reason why this cannot run."""
    plan, problems = try_plan(profile, catalog, facts, machine, remember)
    if plan is None or problems:
        raise ProfileError(profile.in_order(problems))
    return plan


def try_plan(
    profile: Profile, catalog: Catalog, facts: ModelFacts | None, machine: Machine, remember: Path | None = None
) -> tuple[Plan | None, list[Problem]]:
    """The plan, if there can be one, and every reason why this cannot run.

    Without a model (``facts`` is None) there is no plan, and no reason that only a model could give. What follows from
    a value that was refused while loading is no reason. ``remember`` is the file that keeps what was measured before,
    for what is "auto"; None to keep nothing. Raises :class:`~bmoe.errors.PluginError` if nothing is wrong but that a
    plugin cannot check the plan.
    """
    planner = _Planner(profile, catalog, machine, remember)
    plan, problems = planner.plan(facts), planner.problems
    if plan is not None and plan.streaming:
        planner.try_policies(plan)
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

    def __init__(self, profile: Profile, catalog: Catalog, machine: Machine, remember: Path | None) -> None:
        super().__init__(profile, catalog)
        self.notices: list[str] = []
        self._machine, self._remember = machine, remember
        self._facts: ModelFacts = _NO_MODEL
        self._head = False
        self._paths: tuple[str, ...] = ()
        self._why = self._cache_why = "as the profile says"

    def plan(self, given: ModelFacts | None) -> Plan | None:
        """The plan for a model, or None if a choice is lacking or there is no model."""
        machine = self._machine
        profile, model, facts = self.profile, self.profile.model, given or _NO_MODEL
        row = self.catalog.archs.get(facts.arch)
        if row is not None:
            self.allow("arch", row.name, "model.path", "architecture ")
        elif given is not None:
            remedy = suggest(facts.arch, self.catalog.archs)
            self.problem("model.path", f": architecture {toml_value(facts.arch)} has no row; {remedy}")
        self._settings()
        self._facts = facts
        self._files(facts)
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
        by_kind = {choice.kind: choice for choice in chosen if choice.kind not in ("sink", "routing")}
        copied, prefetch = self._copied(by_kind.get("dense"), facts), by_kind.get("prefetch")
        draft = by_kind.get("draft")
        self._head = draft is not None and draft.provider.guesses == "head"
        taken = {"copied": copied, "draft": self._drafts(draft, facts) if draft is not None else 0}
        budget = self._budget(by_kind.get("cache"), facts, machine, taken, ahead=prefetch is not None)
        if prefetch is not None and row is not None:
            self._prefetches(prefetch, budget)
        self._heat(budget, facts)
        if row is None or self.unsure:
            return None
        ubatch = self._ubatch(budget, facts, machine)
        if draft is not None:
            self._fits(ubatch)
        keys = [("arch", row.name), *((choice.kind, choice.name) for choice in chosen)]
        return Plan(
            profile=profile,
            facts=facts,
            row=row,
            cache=by_kind["cache"],
            fetch=by_kind["fetch"],
            dense=by_kind["dense"],
            sinks=tuple(choice for choice in chosen if choice.kind == "sink"),
            routing=tuple(choice for choice in chosen if choice.kind == "routing"),
            importance=by_kind.get("importance"),
            prefetch=prefetch,
            draft=draft,
            budget=budget,
            threads=machine.cpus if model.threads == "auto" else model.threads,
            ctx=model.ctx,
            ubatch=ubatch,
            lanes=profile.fetch.lanes,
            direct=profile.fetch.direct,
            overlap="projection" if profile.stream.overlap == "auto" else profile.stream.overlap,
            notices=tuple(self.notices),
            origins={f"{kind}:{name}": self.catalog.origin(kind, name) for kind, name in keys},
            experimental=any(self.catalog.is_experimental(kind, name) for kind, name in keys),
            paths=self._paths,
            fetch_why=self._why,
            cache_why=self._cache_why,
            draft_bytes=taken["draft"],
        )

    def try_policies(self, plan: Plan) -> None:
        """Build every routing policy once: what a model does not allow is said with all the rest."""
        facts = plan.facts_for_build()
        for choice in plan.routing:
            try:
                choice.provider.build(choice.options, facts)
            except PluginError as exc:
                line = of_option(self.profile, choice, exc)
                path = tuple(choice.path.split("."))
                self.problems.append(Problem(path, line or f"{chosen_at(self.profile, choice)}: {one_line(exc)}"))
            except Exception:  # noqa: BLE001, S112 - said when it is built to be used
                continue

    def prefer(self, kind: str, names: list[str]) -> str:
        """Of several fetchers, the one that reads these files fastest; of policies, the one that replayed best."""
        if kind == "cache":
            # options are those of one policy, and nobody says of which but the default
            given = bool(self.profile.cache.options)
            best = best_policy(None if given else self._remember, self._facts, names)
            self._cache_why = "the default, of which cache.options are" if given else best.why
            return best.name
        if kind != "fetch" or not self.profile.stream.enabled or not self._facts.banks:
            return names[0]

        def builder(name: str) -> Callable[[Facts], Fetcher]:
            provider = self.catalog.providers["fetch"][name]
            return lambda facts: provider.build(provider.options(), facts)

        budget = size_budget(0, 0, self._facts, self._machine.page_bytes)
        facts = build_facts(self.profile, self._facts, budget, self.profile.model.ubatch, self._paths)
        try:
            drive = drive_of(self._paths[0])
        except OSError:
            return names[0]
        key = f"{drive.device} {drive.kind} {self._machine.release}"
        verdict = probe({name: builder(name) for name in names}, facts, key, self._remember)
        self._why = verdict.why
        return verdict.name

    def _files(self, facts: ModelFacts) -> None:
        """Where experts are read from, and what to know about the drives."""
        self._paths = tuple(shard.path for shard in facts.shards)
        if not facts.shards or not self.profile.stream.enabled:
            return
        if self.profile.fetch.roots:
            copies = find_copies(facts, self.profile.fetch.roots)
            for index, wrong in copies.problems:
                self.problem(f"fetch.roots.{index}", f": {wrong}")
            self._paths = copies.paths
            self.notices += copies.notices
        for path in self._paths:
            try:
                caution = drive_of(path).caution
            except OSError:
                continue
            if caution:
                self.notices.append(f"{path} {caution}")

    def _settings(self) -> None:
        """What no version can do, or not this one."""
        for path, value, remedy in demands(self.profile):
            self.problem(path, not_yet(value, remedy))
        model = self.profile.model
        if model.repack and self.profile.stream.enabled:
            self.problem(
                "model.repack",
                " = true cannot be streamed: repacked weights are other bytes; set stream.enabled = false",
                "stream.enabled",
            )
        if not self.profile.stream.enabled:
            for kind in ("route", "io", "compute"):
                if getattr(self.profile.trace, kind) is not None:
                    rest = " needs a streamed model; set stream.enabled = true or leave it out"
                    self.problem(f"trace.{kind}", rest, "stream.enabled")
        if self.profile.routing and not self.profile.stream.enabled:
            said = f" = {toml_value(self.profile.routing[0].plugin)} needs a streamed model"
            self.problem("routing.0.plugin", f"{said}; set stream.enabled = true or leave it out", "stream.enabled")
        if self.profile.loss is not None and not self.profile.routing:
            self.problem("loss.budget", ": there is no routing policy that could spend it; add [[routing]]", "routing")
        if model.kv_type == "q8_0" and model.flash_attention is False:
            self.problem("model.kv_type", ' = "q8_0" needs flash attention; set model.flash_attention = "auto"')

    def _ubatch(self, budget: CacheBudget, facts: ModelFacts, machine: Machine) -> int:
        model = self.profile.model
        wanted = min(model.ubatch, model.ctx)
        most = widest_ubatch(budget.kept, facts, machine.page_bytes) if budget.bytes else None
        if most is None or most >= wanted:
            return wanted
        held = f"the cache of {budget.kept >> 20} MiB holds no more experts of a layer"
        self.notices.append(f"model.ubatch became {most}: {held}; prompts take longer")
        return most

    def _copied(self, dense: Choice | None, facts: ModelFacts) -> int:
        """Bytes that the dense placement will hold of its own."""
        if dense is None or "dense" in self.unsure or not self.profile.stream.enabled:
            return 0
        try:
            return dense.provider.holds(dense.options, facts)
        except Exception as exc:  # noqa: BLE001 - a plugin may raise anything
            why = f"cannot tell what it holds; correct its options or the plugin ({cause(exc)})"
            self.problem(dense.path, f" = {toml_value(dense.name)} {why}")
            return 0

    def _heat(self, budget: CacheBudget, facts: ModelFacts) -> None:
        """A heat file must be of this model, and there must be a cache to read into."""
        path = self.profile.cache.heat
        if path is None or not facts.banks:
            return
        if not self.profile.stream.enabled:
            rest = " needs a streamed model; set stream.enabled = true or leave it out"
            self.problem("cache.heat", rest, "stream.enabled")
            return
        wrong = unusable(path, facts)
        if wrong:
            self.problem("cache.heat", f" = {toml_value(path)} {wrong}")
        elif not budget.bytes:
            self.notices.append("cache.heat is not used: there is no cache")

    def _drafts(self, draft: Choice, facts: ModelFacts) -> int:
        """Bytes that drafting takes, if this drafter can work for this model."""
        if "draft" in self.unsure:
            return 0
        model: ModelFacts | None = None
        said = f" = {toml_value(draft.name)}"
        reason = no_head(facts) if draft.provider.guesses == "head" and facts is not _NO_MODEL else ""
        if reason:
            self.problem("draft.drafter", f"{said} has nothing to guess with: {reason}", "model.path")
        if draft.provider.guesses == "trunk" and not self.profile.stream.enabled:
            self.problem("draft.drafter", f"{said} needs a streamed model; leave [draft] out", "stream.enabled")
        if draft.provider.guesses == "model":
            named = str(getattr(draft.options, "model", ""))
            try:
                model = read_draft_model(named)
            except ModelError as exc:
                self.problem("draft.options.model", f": {one_line(exc)}")
                return 0
            if facts.n_vocab and model.n_vocab != facts.n_vocab:
                rest = f"has {model.n_vocab} tokens in its vocabulary, and the model {facts.n_vocab}"
                remedy = "choose a draft model of the same family"
                self.problem("draft.options.model", f" = {toml_value(named)} {rest}; {remedy}", "model.path")
        try:
            return drafting_bytes(self.profile, facts, draft, model)
        except Exception as exc:  # noqa: BLE001 - a plugin may raise anything
            why = f"cannot tell what it holds; correct its options or the plugin ({cause(exc)})"
            self.problem("draft.drafter", f"{said} {why}")
            return 0

    def _fits(self, ubatch: int) -> None:
        """A draft is verified in one ubatch, with the token before it."""
        section = self.profile.draft
        if section is not None and section.max_draft >= ubatch:
            if ubatch < min(self.profile.model.ubatch, self.profile.model.ctx):
                self.notices.append(f"draft.max_draft became {ubatch - 1}: no more fits beside a token into the ubatch")
                return
            rest = f" = {section.max_draft} does not fit into the ubatch of {ubatch} beside the token before it"
            self.problem("draft.max_draft", f"{rest}; give at most {ubatch - 1} or raise model.ubatch", "model")

    def _prefetches(self, prefetch: Choice, budget: CacheBudget) -> None:
        """A prefetcher needs room for what it suggests."""
        if budget.room or not self.profile.stream.enabled:
            return
        said = f"prefetch.policy = {toml_value(prefetch.name)}"
        if budget.bytes and budget.bytes == self._all_experts():
            self.notices.append(f"{said} is not used: every expert stays in memory")
        elif budget.bytes:
            self.notices.append(f"{said} is not used: a cache of {budget.bytes >> 20} MiB has no room for guesses")
        elif self.profile.cache.budget_mb == "auto" and self.profile.cache.policy != "none":
            self.notices.append(f"{said} is not used: there is no cache")
        else:
            remedy = "raise cache.budget_mb, or leave [prefetch] out"
            self.problem(
                "prefetch.policy", f" = {toml_value(prefetch.name)} needs a cache to read into; {remedy}", "cache"
            )

    def _all_experts(self) -> int:
        """Bytes of a cache that every expert stays in."""
        return size_budget(1 << 62, 0, self._facts, self._machine.page_bytes, head=self._head).bytes

    def _budget(
        self, cache: Choice | None, facts: ModelFacts, machine: Machine, taken: Mapping[str, int], *, ahead: bool
    ) -> CacheBudget:
        section = self.profile.cache
        if not self.profile.stream.enabled:
            return size_budget(0, section.budget_mb, facts, machine.page_bytes)

        def below_cycle(budget: CacheBudget) -> bool:
            if cache is None or "cache" in self.unsure:
                return True
            if section.policy == section.budget_mb == "auto":
                return False  # such a cache makes prompts slow, which only a person can want
            try:
                built = cache.provider.build(
                    cache.options, build_facts(self.profile, facts, budget, self.profile.model.ubatch, self._paths)
                )
            except Exception as exc:  # noqa: BLE001 - a plugin's build may raise anything
                self.problem(cache.path, f" = {toml_value(cache.name)} cannot be built; correct it ({cause(exc)})")
                return True
            return bool(getattr(built, "below_cycle", False))

        claims = claimed(self.profile, facts, self.catalog.archs.get(facts.arch))
        claims = replace(claims, **taken)
        name = cache.name if cache else ""
        outcome: BudgetOutcome = decide_budget(
            section, name, facts, machine, below_cycle, claims, ahead=ahead, head=self._head
        )
        if outcome.problem:
            key, _, rest = outcome.problem.partition(" = ")
            self.problem(key, f" = {rest}", "stream.enabled")
        if outcome.notice:
            self.notices.append(outcome.notice)
        return outcome.budget
