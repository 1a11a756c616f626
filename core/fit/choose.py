"""Which bundled profile, and what of it has to be different for this model and this memory; each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bmoe.budget import MIB, held_bytes
from bmoe.claims import claimed
from bmoe.contracts import ModelFacts
from bmoe.errors import ProfileError
from bmoe.machine import Machine
from bmoe.plan import Plan
from bmoe.planner import try_plan
from bmoe.plugins import Catalog
from bmoe.profile import load_profile

_SMALL_MACHINE = 8 << 30
_LEAST_SPARE = 256 * MIB
_SPARE = 16


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the profile that is not as the bundled one has it: TOML path, value in TOML, and why."""

    path: str
    value: str
    why: str

    @property
    def override(self) -> str:
        """As ``--set`` takes it."""
        return f"{self.path}={self.value}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A profile by name and why it is this one, its own settings, and the plan; ``reason`` says why it cannot run."""

    name: str
    why: str
    settings: tuple[Setting, ...]
    plan: Plan | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the person said: a profile's name or path, ``--set`` overrides, and the memory in bytes; None if nothing."""

    profile: str | None = None
    overrides: tuple[str, ...] = ()
    memory_bytes: int | None = None


def choose(
    facts: ModelFacts, catalog: Catalog, machine: Machine, wish: Wish, *, more: Sequence[str] = (), memory: Path | None
) -> Choice:
    """The profile and its plan on ``machine``, which has the memory that counts.

    ``more`` are overrides that are no matter of the profile; ``memory`` is the file that remembers fetchers. Raises
    ProfileError if the wish itself is wrong.
    """
    free = machine.available_bytes or 0
    wanted = {path for path, _, _ in (text.partition("=") for text in wish.overrides)}
    name, why = (wish.profile, "as asked for") if wish.profile else _profile(facts, free, wanted)
    settings = tuple(_settings(name, facts, free, wanted, wish))
    overrides = [*(s.override for s in settings), *wish.overrides, *more]
    profile = load_profile(name, model=facts.path, overrides=overrides)
    plan, problems = try_plan(profile, catalog, facts, machine, memory)
    if plan is None or problems:
        reason = "; ".join(problem.line.removeprefix(f"{profile.source}: ") for problem in problems)
        if wish.profile or wish.overrides:
            raise ProfileError(profile.in_order(problems))
        return Choice(name, why, settings, None, reason or "the model and the profile do not go together")
    short = needed_bytes(plan) - free
    if machine.available_bytes is not None and short > 0:
        need = needed_bytes(plan)
        return Choice(name, why, settings, plan, f"needs {need // MIB} MiB of memory, {free // MIB} are free")
    return Choice(name, why, settings, plan)


def needed_bytes(plan: Plan) -> int:
    """The least memory that a run takes: dense weights, KV, buffers, and the cache or the places of one layer."""
    facts = plan.facts
    fixed = facts.dense_bytes + claimed(plan.profile, facts, plan.row).nbytes
    if not plan.streaming:
        return fixed + facts.expert_bytes
    layer = max((min(b.n_expert, plan.ubatch * b.n_used) * held_bytes(b, 4096) for b in facts.banks), default=0)
    return fixed + (plan.budget.bytes or layer)


def _profile(facts: ModelFacts, free: int, wanted: set[str]) -> tuple[str, str]:
    spare = _spare(free)
    caches = any(path.startswith(("cache", "stream", "prefetch")) for path in wanted)
    fixed = facts.dense_bytes + claimed(load_profile("resident"), facts, None).nbytes
    if fixed + facts.expert_bytes + spare <= free and not caches:
        return "resident", f"the whole model takes {facts.file_bytes // MIB} of {free // MIB} MiB"
    if free > _SMALL_MACHINE:
        return "desktop-over-ram", f"the model takes {facts.file_bytes // MIB} MiB and {free // MIB} are free"
    share = (free - fixed - spare) / facts.expert_bytes
    name = "phone-near-ram" if share >= 0.5 else "phone-far-past-ram"
    return name, f"a small machine, whose memory holds {100 * max(0.0, share):.0f} % of the experts"


def _settings(name: str, facts: ModelFacts, free: int, wanted: set[str], wish: Wish) -> list[Setting]:
    profile = load_profile(name)
    own = wanted & {"cache.budget_mb", "cache.floor_mb"}
    if not profile.stream.enabled or profile.cache.budget_mb != "auto" or own or wish.profile:
        return []
    dense, spare = facts.dense_bytes, _spare(free)
    floor = (dense + spare) // MIB
    why = f"{dense // MIB} MiB of weights outside the experts are used by every token, {spare // MIB} are for the rest"
    if wish.memory_bytes is None:
        return [Setting("cache.floor_mb", str(floor), why)]
    claims = claimed(profile, facts, None).nbytes
    budget = max(0, free - dense - spare - claims)
    most = sum(b.n_expert * held_bytes(b, 4096) for b in facts.banks)
    if budget < sum(min(b.n_used, b.n_expert) * held_bytes(b, 4096) for b in facts.banks):
        return [Setting("cache.budget_mb", "0", "what is left is less than the experts of one token, which never hit")]
    why = f"of {free // MIB} MiB, {why}, and {claims // MIB} are a conversation's"
    return [Setting("cache.budget_mb", str(min(budget, most) // MIB), why)]


def _spare(free: int) -> int:
    """Memory that is left alone: for the process itself, and for what else begins to run."""
    return max(_LEAST_SPARE, free // _SPARE)


def with_memory(machine: Machine, nbytes: int | None) -> Machine:
    """``machine`` with ``nbytes`` free; as it is for None."""
    return machine if nbytes is None else replace(machine, available_bytes=nbytes)
