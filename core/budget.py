"""How many bytes of experts the cache may hold: in pages, between the machine's limits and one token's cycle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from bmoe.contracts import BankFacts, CacheFacts, ModelFacts
from bmoe.errors import ProfileError
from bmoe.machine import Machine
from bmoe.problems import toml_value
from bmoe.profile import CacheSection

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """The bytes that the cache may hold, and what they mean.

    ``requested`` is what the profile said, MiB or "auto". ``capacity`` and ``cycle`` count entries: how many whole
    ones ``kept`` holds at least, and how many one token touches. ``cycle_bytes`` are the pages of one cycle. ``room``
    is the part of ``bytes`` for what is read ahead of its use, which the policy does not see; with ``least`` bytes,
    ``kept`` is one cycle.
    """

    bytes: int
    requested: float | Literal["auto"]
    capacity: int
    cycle: int
    cycle_bytes: int
    room: int = 0
    least: int = 0

    @property
    def kept(self) -> int:
        """Bytes for what was used, which the policy ranks."""
        return self.bytes - self.room

    def facts(self, seed: int = 0) -> CacheFacts:
        """What a cache policy is told of it."""
        return CacheFacts(self.kept, self.capacity, self.cycle, seed)


@dataclass(frozen=True, slots=True)
class BudgetOutcome:
    """A budget with what must be said about it: ``problem`` refuses the plan, ``notice`` does not; "" if neither."""

    budget: CacheBudget
    problem: str = ""
    notice: str = ""


def held_bytes(bank: BankFacts, page_bytes: int) -> int:
    """The most bytes of memory that one entry of ``bank`` holds: a slice may begin and end inside a page."""
    return sum((math.ceil(p.stride / page_bytes) + 1) * page_bytes for p in bank.projections)


def size_budget(
    bytes_: int,
    requested: float | Literal["auto"],
    facts: ModelFacts,
    page_bytes: int,
    *,
    ahead: bool = False,
    head: bool = False,
) -> CacheBudget:
    """The budget of ``bytes_``, at most what all experts hold; with room for a prefetcher's guesses if ``ahead``.

    With ``head`` the experts of the head for next-token prediction are cached too. A token's cycle is the trunk's.
    """
    banks = (*facts.banks, *facts.nextn_banks) if head else facts.banks
    entries = sum(bank.n_expert for bank in banks)
    everything = sum(bank.n_expert * held_bytes(bank, page_bytes) for bank in banks)
    largest = max((held_bytes(bank, page_bytes) for bank in banks), default=0)
    held = [held_bytes(bank, page_bytes) for bank in facts.banks]
    used = [min(bank.n_used, bank.n_expert) for bank in facts.banks]
    bounded = max(0, min(bytes_, everything))
    cycle = sum(n * size for n, size in zip(used, held, strict=True))
    layers = max((2 * n * size for n, size in zip(used, held, strict=True)), default=0)
    # guesses for one layer arrive while those for the layer before are used; a small budget is for what was used
    room = min(bounded // 4, layers) if ahead and bounded < everything else 0
    room = room if held and room >= largest else 0
    return CacheBudget(
        bytes=bounded,
        requested=requested,
        capacity=min(entries, (bounded - room) // largest) if held else 0,
        cycle=sum(used),
        cycle_bytes=cycle,
        room=room,
        least=min(-(-4 * cycle // 3), cycle + layers) if ahead else cycle,
    )


def widest_ubatch(nbytes: int, facts: ModelFacts, page_bytes: int) -> int | None:
    """Tokens that may be decoded together so that the experts of no layer exceed ``nbytes``; None = any number.

    One matmul needs all experts of its layer at once, and each token may be routed to others.
    """
    widths = [
        max(1, nbytes // held_bytes(bank, page_bytes) // bank.n_used)
        for bank in facts.banks
        if bank.n_expert * held_bytes(bank, page_bytes) > nbytes
    ]
    return min(widths, default=None)


@dataclass(frozen=True, slots=True)
class Claims:
    """Bytes that will be taken from what is free beside the cache, and that an automatic budget therefore leaves.

    ``kv`` and ``compute`` of one conversation, ``copied`` by a dense placement that copies weights, ``draft`` for
    drafting, ``arena`` for the buffers of a prefill. Weights that stay in the model's mapping are not among them: the
    system may take those pages back, and ``cache.floor_mb`` is for them.
    """

    kv: int = 0
    compute: int = 0
    copied: int = 0
    draft: int = 0
    arena: int = 0

    @property
    def nbytes(self) -> int:
        """Their sum."""
        return self.kv + self.compute + self.copied + self.draft + self.arena


NOTHING = Claims()


def compute_bytes(facts: ModelFacts, ctx: int, ubatch: int, *, flash: bool = True, all_logits: bool = False) -> int:
    """A bound of llama.cpp's compute buffers for one context, from what a graph of ``ubatch`` tokens must hold at once.

    Every routed expert of a token has an input, two inner vectors and an output; beside them lives a layer's attention,
    over masks of ``ctx`` by ``ubatch``, without flash attention with a score per head as well. ``all_logits``: a model
    that outputs every token. The buffers themselves are known only once a context exists; they are larger where
    llama.cpp leaves out a flash attention that it could choose (grok and minimax-m3 so far), for which
    ``cache.floor_mb`` has room.
    """
    vocabulary = {t.name for t in facts.dense if facts.n_vocab in t.shape}
    widest = max((t.shape[-1] for t in facts.dense if t.name not in vocabulary and len(t.shape) > 1), default=0)
    widest = max(widest, facts.n_embd)
    routed = facts.n_used * 3 * max(facts.n_embd, facts.expert_width)
    per_token = routed + 6 * widest + 2 * facts.n_expert + (2 * facts.n_vocab if all_logits else 0)
    per_position = 4 if flash else 4 * (facts.n_head + 4)
    return ubatch * (4 * per_token + per_position * ctx) + 4 * facts.n_vocab + (8 << 20)


def decide_budget(
    cache: CacheSection,
    policy: str,
    facts: ModelFacts,
    machine: Machine,
    below_cycle: Callable[[CacheBudget], bool],
    claims: Claims = NOTHING,
    *,
    ahead: bool = False,
    head: bool = False,
) -> BudgetOutcome:
    """The budget for ``policy``, the chosen cache policy ("" if it is not known), beside what else will be taken.

    ``ahead``: with room for what a prefetcher suggests; ``head``: for the model's head for next-token prediction too.

    ``below_cycle(budget)`` tells whether the policy has hits below one token's cycle; asked only where it matters.
    """
    if machine.available_bytes is not None:
        left = max(0, machine.available_bytes - claims.nbytes)
        machine = replace(machine, available_bytes=left)

    def sized(amount: float) -> CacheBudget:
        return size_budget(int(amount), cache.budget_mb, facts, machine.page_bytes, ahead=ahead, head=head)

    off = sized(0)
    if policy == "none":
        if cache.budget_mb in ("auto", 0):
            return BudgetOutcome(off)
        said = f"cache.budget_mb = {toml_value(cache.budget_mb)}"
        return BudgetOutcome(off, problem=f'{said} has no use with cache.policy = "none"; set 0 or choose a policy')
    if not facts.banks:
        return BudgetOutcome(off)
    if cache.budget_mb == "auto":
        return _automatic(cache, machine, sized, below_cycle)
    budget = sized(round(cache.budget_mb * MIB))
    if budget.bytes == 0:
        unused = f'cache.policy = "{policy}" is not used: cache.budget_mb is 0'
        return BudgetOutcome(off, notice=unused if cache.policy != "auto" else "")
    smallest = min(bank.entry_bytes for bank in facts.banks)
    if budget.kept < smallest or (budget.kept < budget.cycle_bytes and not below_cycle(budget)):
        return BudgetOutcome(off, problem=_too_small(cache, policy, budget))
    if machine.available_bytes is not None and budget.bytes > machine.available_bytes:
        free = machine.available_bytes // MIB
        return BudgetOutcome(budget, notice=f"cache.budget_mb is {budget.bytes // MIB} MiB, but only {free} are free")
    return BudgetOutcome(budget)


def resized(
    budget_mb: float, facts: ModelFacts, page_bytes: int, below_cycle: bool, *, ahead: bool = False, head: bool = False
) -> CacheBudget:
    """The budget that an open cache is given anew, at most what all experts hold; ProfileError if refused.

    Refused is what a plan refuses too: less than one token uses, unless the policy hits ``below_cycle``.
    """
    said = f"resize_cache({budget_mb!r})"
    number = isinstance(budget_mb, int | float) and not isinstance(budget_mb, bool)
    if not number or not 0 <= budget_mb < math.inf:
        raise ProfileError(f"{said}: the budget is no number of MiB; give one of at least 0")
    budget = size_budget(round(budget_mb * MIB), budget_mb, facts, page_bytes, ahead=ahead, head=head)
    smallest = min(bank.entry_bytes for bank in facts.banks)
    need = smallest if below_cycle else budget.least
    if budget.bytes < need:
        raise ProfileError(
            f"{said} is below what one token uses ({budget.cycle} experts); give at least {math.ceil(need / MIB)}, "
            "or open the engine with cache.budget_mb = 0 to turn the cache off"
        )
    return budget


def _too_small(cache: CacheSection, policy: str, budget: CacheBudget) -> str:
    said = f"cache.budget_mb = {toml_value(cache.budget_mb)}"
    need = math.ceil(budget.least / MIB)
    return (
        f"{said} is below what one token uses ({budget.cycle} experts), so that {policy or 'the policy'} would never "
        f"hit; give at least {need}, or 0 to turn the cache off"
    )


def _automatic(
    cache: CacheSection,
    machine: Machine,
    sized: Callable[[float], CacheBudget],
    below_cycle: Callable[[CacheBudget], bool],
) -> BudgetOutcome:
    off = sized(0)
    if machine.available_bytes is None:
        why = "free memory is unknown on this system; give cache.budget_mb"
        return BudgetOutcome(off, notice=f'cache.budget_mb = "auto" became 0: {why}')
    free = machine.available_bytes - cache.floor_mb * MIB
    budget = sized(min(free, cache.ceil_mb * MIB) if cache.ceil_mb else free)
    if budget.bytes and (budget.kept >= budget.cycle_bytes or below_cycle(budget)):
        return BudgetOutcome(budget)
    if cache.ceil_mb and cache.ceil_mb * MIB < free:
        limit = f"cache.ceil_mb = {cache.ceil_mb:.15g}"
    else:
        limit = f"{machine.available_bytes // MIB} MiB free, cache.floor_mb = {cache.floor_mb:.15g}"
    need = math.ceil(budget.least / MIB)
    return BudgetOutcome(
        off, notice=f'cache.budget_mb = "auto" became 0: {budget.bytes // MIB} MiB ({limit}), one token uses {need}'
    )
