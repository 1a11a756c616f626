"""How many tokens to draft next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Round:
    """What a round came to."""

    drafted: int
    accepted: int
    seconds: float
    read_bytes: int
    decodes: float


class DraftLength:
    """Always the most."""

    def __init__(self, most: int, *, governor: str = "auto") -> None:
        self.limit = most
        self.off_rounds = 0

    def ended(self, last: Round) -> None:
        """Nothing is judged."""
