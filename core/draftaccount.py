"""What the drafts of a generation came to: how many tokens were accepted, at which place, and what it cost."""

from __future__ import annotations

from typing import Any

from bmoe.costs import DecodeCost
from bmoe.decode import Draft
from bmoe.drafting import Drafting


class DraftAccount:
    """Adds up the drafts of one generation by ``drafting``."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._off_before = drafting.length.off_rounds
        self._reached: list[int] = []
        self._accepted: list[int] = []
        self._rounds = self.drafted = self.accepted = 0
        self.cost = DecodeCost()
        self.seconds = 0.0
        self.rejected_bytes = 0

    def add(self, draft: Draft) -> None:
        """A round ended."""
        self.cost.add(draft.cost)
        self.seconds += draft.seconds
        self.rejected_bytes += draft.wasted_bytes
        if not draft.drafted:
            return
        self._rounds += 1
        self.drafted += draft.drafted
        self.accepted += draft.accepted
        missing = draft.depth - len(self._reached)
        self._reached += [0] * missing
        self._accepted += [0] * missing
        for place in range(min(draft.accepted + 1, draft.depth)):
            self._reached[place] += 1
            self._accepted[place] += place < draft.accepted

    def summary(self, decode: DecodeCost, tokens: int) -> dict[str, Any]:
        """Fields of a :class:`~bmoe.contracts.RunSummary`, with the decodes that gave so many ``tokens``."""
        read = decode.all_bytes + self.cost.all_bytes
        measured = decode.read_bytes is not None and tokens > 0
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_length": (self.accepted + self._rounds) / self._rounds if self._rounds else None,
            "acceptance": tuple(a / n if n else None for a, n in zip(self._accepted, self._reached, strict=True)),
            "draft_s": self.seconds,
            "draft_bytes": self.cost.all_bytes,
            "rejected_bytes": self.rejected_bytes,
            "bytes_per_output_token": read / tokens if measured else None,
            "s_per_output_token": (decode.decode_s + self.seconds) / tokens if tokens else None,
            "draft_off_rounds": self._drafting.length.off_rounds - self._off_before,
        }
