"""What a token takes beside products and reads: measured with the bundled model, in short runs on this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from bmoe.bundled import find_model
from bmoe.contracts import ArchRow
from bmoe.costs import DecodeCost
from bmoe.fit import processor
from bmoe.fit.trial import run
from bmoe.layout import read_model
from bmoe.native import memory

MODEL = "bmoe-ref"
_TOKENS, _SECONDS = 32, 0.02
_FAULTS = 0.25
"""Page faults' worth of time that finding a place costs for each page: most pages are moved, not faulted."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of the processor's own time, not of the clock.

    ``layer_s`` is what each layer takes beside its products; a place for an expert takes ``entry_s`` in a cache, where
    another is given up for it, and ``byte_s`` for each of its bytes, or ``shared_s`` without a cache.
    """

    layer_s: float
    entry_s: float = 0.0
    byte_s: float = 0.0
    shared_s: float = 0.0

    def mean(self, other: Overhead) -> Overhead:
        """Of two measurements."""
        return Overhead(*((a + b) / 2 for a, b in zip(astuple(self), astuple(other), strict=True)))


def measure(rows: Mapping[str, ArchRow], threads: int, *, streaming: bool) -> Overhead:
    """Run the bundled model and take away what its products and reads take: what is left is this.

    ``rows`` has its architecture. Some 0.5 s, with ``streaming`` 1.5 s. Raises what a run raises.
    """
    facts = read_model(find_model(MODEL), rows)
    multiplied = processor.measure(facts, threads, _SECONDS).compute_s
    settings = [f"model.threads={threads}", "sink=[]"]

    def own_s(profile: str, *more: str) -> tuple[float, float]:
        """Seconds per token of the processor's own time, and experts per token that had to be read."""
        cost = run(profile, MODEL, [*settings, *more], _TOKENS)
        return _own_s(cost, threads) / cost.decodes, ((cost.lookups or 0) - (cost.hits or 0)) / cost.decodes

    if not streaming:
        each, _ = own_s("resident")
        return Overhead(max(0.0, each - multiplied) / facts.n_layer)
    entry = facts.expert_bytes / sum(bank.n_expert for bank in facts.banks)
    hit, few = own_s("demo", f"cache.budget_mb={2 * facts.expert_bytes >> 20}")
    third, some = own_s("demo")
    off, all_ = own_s("demo", "cache.budget_mb=0")
    byte_s = _FAULTS * _fault_s() / memory.PAGE
    return Overhead(
        layer_s=max(0.0, hit - multiplied) / facts.n_layer,
        entry_s=max(0.0, (third - hit) / max(some - few, 1.0) - byte_s * entry),
        byte_s=byte_s,
        shared_s=max(0.0, (off - hit) / max(all_ - few, 1.0)),
    )


def granted(cost: DecodeCost, threads: int) -> float:
    """The share of ``threads`` processors that a run had while it did not wait for reads."""
    busy = cost.decode_s - (cost.read_wait_s or 0.0)
    return min(1.0, cost.cpu_s / (busy * threads)) if busy > 0 else 1.0


def _own_s(cost: DecodeCost, threads: int) -> float:
    return (cost.decode_s - (cost.read_wait_s or 0.0)) * granted(cost, threads)


def _fault_s() -> float:
    """Seconds that the first write to a page takes."""
    region = memory.reserve(8 << 20)
    try:
        began = time.perf_counter()
        memory.fill(region.address, 0, region.nbytes)
        return (time.perf_counter() - began) / (region.nbytes / memory.PAGE)
    finally:
        region.close()
