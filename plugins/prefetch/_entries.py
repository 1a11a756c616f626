"""From the experts that are expected of a layer to the entries that they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bmoe import expert_key
from bmoe.contracts import BankFacts, ExpertKey


def by_layer(banks: Sequence[BankFacts]) -> dict[int, list[BankFacts]]:
    """The banks of each routed layer, in the order of the graph."""
    found: dict[int, list[BankFacts]] = {}
    for bank in sorted(banks, key=lambda bank: (bank.layer, bank.bank)):
        found.setdefault(bank.layer, []).append(bank)
    return found


def entries(banks: Sequence[BankFacts], experts: Iterable[int]) -> list[ExpertKey]:
    """Of one layer's ``banks``, in the order of ``experts``, none twice.

    A second bank is routed by a copy, its experts' numbers those of the first divided.
    """
    count = banks[0].n_expert
    return list(
        dict.fromkeys(
            expert_key(bank.layer, expert * bank.n_expert // count, bank.bank) for expert in experts for bank in banks
        )
    )
