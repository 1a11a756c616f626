"""Does it run, how fast, and what would help: the parts of the answer put together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bmoe.contracts import ModelFacts
from bmoe.errors import ModelError
from bmoe.fit.choose import Choice, Setting, Wish, choose, with_memory
from bmoe.fit.curve import HitRate, expected_hits
from bmoe.fit.estimate import PAGE, Estimate, estimate
from bmoe.fit.measure import Measured, measure, reader
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
    measured: Measured | None = None
    advice: tuple[Advice, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether it runs."""
        return self.estimate is not None

    def at(self, hit_rate: float, share: float) -> Estimate:
        """The estimate for another hit rate and another share of the processor, such as those of a run."""
        assert self.measured is not None
        assert self.choice.plan is not None
        costs = replace(self.measured.costs, share=min(1.0, max(share, 0.01)))
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
    """Choose, measure, estimate: some 3 s, and 10 s where experts are streamed.

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
    hits = _hits(plan, hit_rate)

    def expect(measured: Measured) -> Estimate:
        return estimate(facts, measured.costs, hits.expected, cached=plan.budget.bytes > 0)

    with reader(plan, place, remote=remote) as read:
        usual = measure(plan, catalog.archs, plan.threads, read)
        measured = usual
        if plan.threads > 1 and plan.profile.model.threads == "auto" and not wish.profile:
            single = measure(plan, catalog.archs, 1, lambda: usual.drive)
            slower = expect(usual).token_s / expect(single).token_s
            if slower >= _CLEARLY:
                measured, why = single, f"with {plan.threads} a token takes {slower:.1f} times as long"
                setting = Setting("model.threads", "1", why)
                choice = replace(choice, settings=(*choice.settings, setting))
        measured = measured.mean(measure(plan, catalog.archs, measured.processor.threads, read))
    found = expect(measured)
    made = Fit(facts, free, choice, "", hits, found, measured)
    advice = sorted(_advice(made, plan, fixed=hit_rate is not None), key=lambda each: -each.gain)
    return replace(made, advice=tuple(each for each in advice if each.gain >= _WORTH))


def held_share(plan: Plan, nbytes: int | None = None, scale: float = 1.0) -> float:
    """The share of all experts that the cache holds, or one of ``nbytes`` would, with experts of ``scale`` the size.

    Of the pages at the ends of a slice each neighbour has its part: where both are in memory they count once. So with
    a share s held, an expert takes its bytes and, for each of its slices, (1 - s) pages.
    """
    banks = plan.facts.banks
    experts = sum(bank.n_expert for bank in banks)
    if not experts:
        return 0.0
    own = plan.facts.expert_bytes * scale / experts
    edges = PAGE * sum(bank.n_expert * len(bank.projections) for bank in banks) / experts
    each = (plan.budget.bytes if nbytes is None else nbytes) / experts
    if each >= own:
        return 1.0
    return (own + edges - math.sqrt((own + edges) ** 2 - 4 * edges * each)) / (2 * edges)


def _hits(plan: Plan, given: float | None) -> HitRate:
    facts = plan.facts
    if not plan.streaming:
        return HitRate(1.0, 1.0, 1.0, "the whole model is in memory")
    if given is not None:
        return HitRate(given, given, given, "as given")
    return expected_hits(facts.name, facts.n_expert, facts.n_used, held_share(plan), plan.cache.name)


def _advice(fit: Fit, plan: Plan, *, fixed: bool) -> Iterator[Advice]:
    facts, now, measured = fit.facts, fit.estimate, fit.measured
    assert now is not None
    assert measured is not None
    costs, processor = measured.costs, measured.processor
    cached = plan.budget.bytes > 0

    def expected(share: float) -> float:
        if fixed:
            return now.hit_rate
        return expected_hits(facts.name, facts.n_expert, facts.n_used, share, plan.cache.name).expected

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
