"""Does it run, how fast, and what would help: the parts of the answer put together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from bmoe.budget import size_budget
from bmoe.contracts import ModelFacts
from bmoe.errors import ModelError
from bmoe.fit import drive as drives
from bmoe.fit import processor as processors
from bmoe.fit.choose import Choice, Setting, Wish, choose, with_memory
from bmoe.fit.curve import HitRate, expected_hits
from bmoe.fit.estimate import Costs, Estimate, estimate
from bmoe.machine import Machine
from bmoe.plan import Plan
from bmoe.plugins import Catalog
from bmoe.registry import AUTO

_WORTH = 1.05
_SMALLER = 0.75
_FINE = 4.0
_BUSY = 0.85
_CLEARLY = 1.1


@dataclass(frozen=True, slots=True)
class Advice:
    """What would make it faster, and by which factor."""

    what: str
    gain: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer. ``estimate`` and what it is made from are None where the model cannot run; ``reason`` says why."""

    facts: ModelFacts
    memory_bytes: int | None
    choice: Choice
    reason: str
    hits: HitRate | None = None
    estimate: Estimate | None = None
    costs: Costs | None = None
    processor: processors.Processor | None = None
    drive: drives.Drive | None = None
    advice: tuple[Advice, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether it runs."""
        return self.estimate is not None

    def at(self, hit_rate: float, share: float) -> Estimate:
        """The estimate for another hit rate and another share of the processor, such as those of a run."""
        assert self.costs is not None
        assert self.choice.plan is not None
        costs = replace(self.costs, share=min(1.0, max(share, 0.01)))
        return estimate(self.facts, costs, hit_rate, cached=self.choice.plan.budget.bytes > 0)


def judge(
    facts: ModelFacts,
    catalog: Catalog,
    machine: Machine,
    wish: Wish,
    *,
    hit_rate: float | None = None,
    place: str | None = None,
    remote: bool = False,
    remember: Path | None = None,
) -> Fit:
    """Choose, measure, estimate: some 4 s.

    ``place`` is where the drive is measured instead of the model's own files, which a ``remote`` one has none of;
    ``hit_rate`` replaces that of the reference curves. Raises what the measurements raise: ReadError, ModelError,
    NativeError; ProfileError for a wrong wish.
    """
    machine = with_memory(machine, wish.memory_bytes)
    more = [f"fetch.plugin={_first_fetcher(catalog)}"] if remote else []
    choice = choose(facts, catalog, machine, wish, more=more, memory=None if remote else remember)
    plan, free = choice.plan, machine.available_bytes
    if plan is None or choice.reason:
        return Fit(facts, free, choice, choice.reason)
    choice, processor = _threads(choice, plan, wish)
    drive, costs = None, Costs(processor.compute_s, processor.layer_s, 0, 0, 0, 0, 0, 0, processor.share)
    hits = HitRate(1.0, 1.0, 1.0, "the whole model is in memory")
    if plan.streaming:
        with drives.sample(place or ".") if remote or place else nullcontext() as path:
            drive = drives.measure(facts, plan.fetch, plan.facts_for_build(), path)
        if path is not None:
            drive = replace(drive, path=place or ".")  # the file itself is gone, and may never have had a name
        costs = replace(
            costs,
            first_s=drive.first_s,
            next_s=drive.next_s,
            slice_bytes=drive.slice_bytes,
            entry_s=processor.entry_s,
            byte_s=processor.byte_s,
            shared_s=processor.shared_s,
        )
        hits = expected_hits(facts.name, facts.n_expert, facts.n_used, held_share(plan))
    if hit_rate is not None and plan.streaming:
        hits = HitRate(hit_rate, hit_rate, hit_rate, "as given")
    found = estimate(facts, costs, hits.expected, cached=plan.budget.bytes > 0)
    made = Fit(facts, free, choice, "", hits, found, costs, processor, drive)
    advice = sorted(_advice(made, plan, fixed=hit_rate is not None), key=lambda each: -each.gain)
    return replace(made, advice=tuple(each for each in advice if each.gain >= _WORTH))


def held_share(plan: Plan, nbytes: int | None = None, scale: float = 1.0) -> float:
    """The share of all experts that the cache holds, or one of ``nbytes`` would, with experts of ``scale`` the size."""
    budget = plan.budget if nbytes is None else size_budget(nbytes, 0, plan.facts, 4096)
    entries = sum(bank.n_expert for bank in plan.facts.banks)
    return min(1.0, budget.capacity / scale / entries) if entries else 0.0


def _threads(choice: Choice, plan: Plan, wish: Wish) -> tuple[Choice, processors.Processor]:
    """Measure with the plan's threads and with one; where that is faster it becomes a setting, with the reason."""
    usual = processors.measure(plan.facts, plan.threads)
    if plan.profile.model.threads != "auto" or plan.threads == 1 or wish.profile:
        return choice, usual
    single = processors.measure(plan.facts, 1)
    slower = usual.compute_s / usual.share / (single.compute_s / single.share)
    if slower < _CLEARLY:
        return choice, usual
    why = f"{plan.threads} threads took {slower:.1f} times as long: the cores are busy"
    setting = Setting("model.threads", "1", why)
    return replace(choice, settings=(*choice.settings, setting)), single


def _advice(fit: Fit, plan: Plan, *, fixed: bool) -> Iterator[Advice]:
    facts, costs, now, processor = fit.facts, fit.costs, fit.estimate, fit.processor
    assert costs is not None
    assert now is not None
    assert processor is not None
    cached = plan.budget.bytes > 0

    def expected(share: float) -> float:
        return now.hit_rate if fixed else expected_hits(facts.name, facts.n_expert, facts.n_used, share).expected

    def gain(other: Estimate) -> float:
        return now.token_s / other.token_s

    if processor.share < _BUSY:
        free = replace(costs, share=1.0)
        said = f"other programs take {100 * (1 - processor.share):.0f} % of the processor: stop them"
        yield Advice(said, gain(estimate(facts, free, now.hit_rate, cached=cached)))
    if not plan.streaming:
        return
    free_bytes = fit.memory_bytes or 0
    if not fixed and plan.profile.cache.budget_mb != "auto" and not _from_memory(fit.choice):
        more = estimate(facts, costs, expected(held_share(plan, 2 * plan.budget.bytes)))
        yield Advice(f"a cache of twice the size, {2 * plan.budget.bytes / 2**20:.0f} MiB", gain(more))
    elif not fixed and free_bytes:
        more = estimate(facts, costs, expected(held_share(plan, plan.budget.bytes + free_bytes)))
        yield Advice(f"twice the memory, {2 * free_bytes / 2**30:.1f} GiB", gain(more))
    quick = estimate(facts, costs.faster_drive(2), now.hit_rate, cached=cached)
    yield Advice(f"a drive that is twice as fast, {2 * costs.bandwidth / 1e9:.1f} GB/s", gain(quick))
    elements = sum(b.n_expert * 3 * facts.n_embd * facts.expert_width for b in facts.banks)
    if facts.expert_bytes * 8 > _FINE * elements * _SMALLER:
        rate = expected(held_share(plan, scale=_SMALLER))
        smaller = estimate(facts, costs, rate, scale=_SMALLER, cached=cached)
        said = f"a quantisation with experts of {100 * _SMALLER:.0f} % of the size, at a loss of quality"
        yield Advice(said, gain(smaller))
    double = replace(costs, compute_s=costs.compute_s / 2)
    yield Advice("a processor that is twice as fast", gain(estimate(facts, double, now.hit_rate, cached=cached)))


def _from_memory(choice: Choice) -> bool:
    return any(setting.path == "cache.budget_mb" for setting in choice.settings)


def _first_fetcher(catalog: Catalog) -> str:
    for name in AUTO["fetch"]:
        provider = catalog.providers["fetch"].get(name)
        if provider is not None and not provider.available():
            return name
    raise ModelError("no fetcher can read here; install bmoe again")
