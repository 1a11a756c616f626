"""Seconds per token and bytes per token, from a hit rate and what processor and drive were measured to do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bmoe.contracts import ModelFacts
from bmoe.fit.overhead import Overhead

PAGE = 4096
MARGIN = 1.25
"""The range goes from the expected speed over this to the speed times this: 1.56 from end to end."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured, in seconds.

    Of the processor: ``compute_s`` a token's products, and the ``overhead`` beside them; by the clock they take longer
    if only a ``share`` of the processor is granted, others having the rest.
    A read of one expert's slices takes ``first_s``, each further expert read with it ``next_s``, both for experts of
    ``slice_bytes``.
    """

    compute_s: float
    overhead: Overhead
    share: float = 1.0
    first_s: float = 0.0
    next_s: float = 0.0
    slice_bytes: int = 0

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the drive with many reads in flight."""
        return self.slice_bytes / self.next_s if self.next_s else 0.0

    def faster_drive(self, factor: float) -> Costs:
        """With reads that take a ``factor`` less."""
        return replace(self, first_s=self.first_s / factor, next_s=self.next_s / factor)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a token will take; ``low`` and ``high`` are tokens per second."""

    hit_rate: float
    bytes_per_token: float
    compute_s: float
    read_s: float
    manage_s: float

    @property
    def token_s(self) -> float:
        """Seconds per token. Reads and arithmetic are added: what they overlap is within the range's margin."""
        return self.compute_s + self.read_s + self.manage_s

    @property
    def tok_s(self) -> float:
        """The expected tokens per second."""
        return 1 / self.token_s

    @property
    def low(self) -> float:
        """The least that is likely."""
        return self.tok_s / MARGIN

    @property
    def high(self) -> float:
        """The most that is likely."""
        return self.tok_s * MARGIN


def estimate(facts: ModelFacts, costs: Costs, hit_rate: float, *, scale: float = 1.0, cached: bool = True) -> Estimate:
    """A token's cost with ``hit_rate`` (0 to 1) of its experts in memory; experts ``scale`` times as large as they are.

    Not ``cached``: experts are read into shared places, for which no memory has to be found.
    """
    miss, over = 1 - min(max(hit_rate, 0.0), 1.0), costs.overhead
    nbytes = read_s = manage_s = 0.0
    for bank in facts.banks:
        used = min(bank.n_used, bank.n_expert)
        # direct reads are of whole pages, of which a slice has one more than it fills
        entry = bank.entry_bytes * scale + len(bank.projections) * (PAGE - 1)
        missing = used * miss
        any_missing = 1 - (1 - miss) ** used
        ratio = entry / costs.slice_bytes if costs.slice_bytes else 0.0
        nbytes += missing * entry
        read_s += any_missing * max(0.0, costs.first_s - costs.next_s) + missing * costs.next_s * ratio
        manage_s += missing * (over.entry_s + over.byte_s * entry if cached else over.shared_s)
    layers = facts.n_layer - facts.n_nextn
    compute_s = (costs.compute_s + layers * over.layer_s) / costs.share
    return Estimate(1 - miss, nbytes, compute_s, read_s, manage_s / costs.share)
