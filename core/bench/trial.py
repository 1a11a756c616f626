"""One measurement of one side: the series that it keeps, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bmoe.bench.entry import EntryState


@dataclass(frozen=True)
class Trial:
    """What one process measured; every series has one value a measured token, None where it is unmeasured.

    ``warmup_s`` are the decode calls that came before and count for nothing. ``bytes`` were read from the drive,
    guesses included. ``given`` tells that the tokens were those of an earlier trial; ``tokens`` are those that were
    decoded, ``choices`` what this side would have continued with. ``logits_sha256`` is of the last row.
    """

    round: int
    side: int
    prompt: int
    entry: EntryState
    prompt_tokens: int
    given: bool
    tokens: Sequence[int]
    choices: Sequence[int]
    logits_sha256: str
    open_s: float
    prefill_s: float
    peak_rss_bytes: int | None
    warmup_s: Sequence[float]
    decode_s: Sequence[float]
    read_wait_s: Sequence[float | None]
    manage_s: Sequence[float | None]
    hits: Sequence[int | None]
    lookups: Sequence[int | None]
    bytes: Sequence[int | None]
    evictions: Sequence[int | None]
    majflt: Sequence[int | None]
    run: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def token_s(self) -> float:
        """Seconds per token: the mean over the measured tokens."""
        return sum(self.decode_s) / len(self.decode_s)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the run record, which a side has once."""
        values = asdict(self)
        del values["run"]
        return values


def total(series: Sequence[float | int | None]) -> float | None:
    """The sum of what was measured; None if nothing was."""
    known = [value for value in series if value is not None]
    return sum(known) if known else None
