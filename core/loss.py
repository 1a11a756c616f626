"""One loss budget over all routing policies: what they would change is taken slot by slot, as far as it goes.

A routing loses mass when experts with less of the router's probability compute in place of the model's own, or fewer.
The loss of a token is the mean of its routings' losses. The budget is an upper bound for every token, not an average:
after each of its layers a token has lost at most the budget times the layers so far. Within it goes first what saves
most bytes per mass. Own work; the bound is held per token since a mean hides the few that are ruined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Turned(NamedTuple):
    """What a routing became: ids int32, dead and mute bool, all [n_tokens, n_used]."""

    ids: NDArray[np.int32]
    dead: NDArray[np.bool_]
    mute: NDArray[np.bool_]

    @property
    def out(self) -> NDArray[np.bool_]:
        """The slots that take no part."""
        found: NDArray[np.bool_] = self.dead | self.mute
        return found

    def none(self) -> NDArray[np.bool_]:
        """No slot."""
        return np.zeros(self.dead.shape, bool)

    def differs(self, own: NDArray[np.int32]) -> bool:
        """Whether anything is other than the model's ``own`` choice."""
        return bool((self.ids != own).any() or self.dead.any() or self.mute.any())


class Ledger:
    """What the tokens of one decode have lost so far, float64 [n_tokens], and over how many routings."""

    def __init__(self, n_tokens: int) -> None:
        self.spent = np.zeros(n_tokens)
        self.routings = np.zeros(n_tokens, dtype=np.int64)

    def allowed(self, rows: Sequence[int] | slice, budget: float) -> NDArray[np.float64]:
        """How much each of these tokens may lose at its next routing."""
        found: NDArray[np.float64] = budget * (self.routings[rows] + 1) - self.spent[rows]
        return found

    def lost(self, rows: Sequence[int] | slice, mass: NDArray[np.float64]) -> None:
        """They lost this at a routing."""
        self.spent[rows] += mass
        self.routings[rows] += 1

    def keep(self, rows: Sequence[int] | slice) -> None:
        """They lost nothing at a routing."""
        self.routings[rows] += 1

    @property
    def means(self) -> NDArray[np.float64]:
        """The loss of each token: the mean over its routings; 0 before there is one."""
        found: NDArray[np.float64] = self.spent / np.maximum(self.routings, 1)
        return found


def mass_lost(own: NDArray[np.float64], turned: Turned, probs: NDArray[np.float32]) -> NDArray[np.float64]:
    """The share of each token's router mass that a routing gives up, [n_tokens], from 0 to 1.

    ``own`` [n_tokens] is the probability of the model's own choice.
    """
    kept = probs[np.arange(len(own))[:, None], turned.ids].astype(np.float64)
    kept[turned.out] = 0
    found: NDArray[np.float64] = np.clip(1 - kept.sum(axis=1) / own, 0, 1)
    return found


def draw(
    own: NDArray[np.int32],
    proposals: Sequence[Turned],
    probs: NDArray[np.float32],
    missing: NDArray[np.bool_],
    allowed: NDArray[np.float64],
) -> Turned:
    """Of what several policies propose for one routing, what ``allowed`` [n_tokens] mass pays for.

    ``missing`` bool [n_expert]: a slot that needs one of these costs a read, shared by the tokens that need it. A
    change that saves no read is left.
    """
    ids, dead, mute = own.copy(), np.zeros(own.shape, bool), np.zeros(own.shape, bool)
    users = np.bincount(own.ravel(), minlength=len(missing))
    changed = np.zeros(len(own), bool)
    for proposal in proposals:
        changed |= ((proposal.ids != own) | proposal.dead | proposal.mute).any(axis=1)
    for token in np.flatnonzero(changed).tolist():
        p, row = probs[token].tolist(), own[token].tolist()
        whole, budget = sum(p[e] for e in row), float(allowed[token])
        offers: list[tuple[float, float, int, int, bool, bool]] = []
        for proposal in proposals:
            columns = (column[token].tolist() for column in proposal)
            for slot, (new, gone, silent) in enumerate(zip(*columns, strict=True)):
                old, out = row[slot], gone or silent
                # what other tokens of the batch need is read anyway
                if not missing[old] or (new == old and not out) or (not out and missing[new] and not users[new]):
                    continue
                lost = max(0.0, (p[old] - (0.0 if out else p[new])) / whole)
                offers.append((lost * users[old], lost, slot, new, gone, silent))
        taken: set[int] = set()
        live = len(row)
        for _, lost, slot, new, gone, silent in sorted(offers):
            out = gone or silent
            if slot in taken or lost > budget or (out and live == 1) or (not out and new in ids[token]):
                continue
            taken.add(slot)
            budget -= lost
            live -= out
            dead[token, slot], mute[token, slot] = gone, silent and not gone
            if not out:
                ids[token, slot] = new
    return Turned(ids, dead, mute)
