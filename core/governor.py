"""How far a prefetcher is heard: how many of its guesses may be out, and whether it pays to read ahead at all.

Trust follows the guesses one by one. Whether it pays is measured: a few tokens at a time nothing is suggested, and what
tokens take with and without is compared: the whole decode, since a prefetcher that saves waiting may cost the processor
more than that. One that loses is switched off, and tried again later and later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import median

from bmoe.log import get_logger

_OUT, _MEMORY, _ASK = 16, 16, 8
"""A prefetcher that is always right may have ``_OUT`` guesses in flight, others as the square of the share of theirs
that was used lately (the last ``_MEMORY`` or so): a wrong one costs more than a right one saves, since the device could
have read what was needed. One that is hardly ever right is heard at every ``_ASK``-th routing."""
_ON, _OFF, _BETWEEN = 4, 4, 80
"""Tokens with and without in a round of a trial, and those with in a round afterwards. The first of either side is not
counted: it has the guesses, or the lack of them, of the other."""
_ROUNDS, _ENOUGH, _SURE, _MORE = 6, 4, 2.2, 1.05
"""Rounds that are looked back on, those that a verdict needs (4 of a trial are 32 tokens), by how many standard errors
it has to be sure, and how much longer the median with has to be."""
_USED, _SEEN, _SOON, _LEAST = 0.25, 24, 12, 4
"""The share of what was read in the last ``_SEEN`` tokens with guesses that has to be used, asked from ``_SOON`` tokens
and as many bytes as ``_LEAST`` entries on: below it trust allows one guess at a time, which saves next to nothing and
wears the drive."""
_PAUSE, _LONGEST = 64, 4096
"""Tokens until it is tried again, doubled each time that it loses."""


class Governor:
    """``entry_bytes`` is what one guess reads. Call :meth:`token` after each decode of one token."""

    def __init__(self, entry_bytes: int) -> None:
        self.note = ""
        """Why nothing is read ahead now, in words; empty while it is."""
        self.off_tokens = 0
        """Decodes of one token for which it was switched off; those of a comparison are not counted."""
        self._least = _LEAST * entry_bytes
        self._right, self._asked = 0.5, 0
        self._tokens, self._pause, self._until = 0, _PAUSE, 0
        self._log = get_logger()
        self._begin()

    @property
    def is_on(self) -> bool:
        """Whether guesses are asked for in the decode that is next."""
        return not self.note and not self._probing

    def judge(self, right: bool) -> None:
        """A guess was used by the next routing of its layer, or it was not."""
        self._right += (right - self._right) / _MEMORY

    def allowed(self) -> int:
        """How many guesses may be in flight now; asked once for every routing."""
        if not self.is_on:
            return 0
        trusted = int(_OUT * self._right**2 + 0.5)
        self._asked += 1
        return trusted or int(self._asked % _ASK == 0)

    def token(self, took_s: float, read_bytes: int, used_bytes: int) -> bool:
        """One token was decoded: how long it took, and what was read ahead and used during it. Whether it is off now.

        ``took_s`` is the whole decode: waiting, managing, computing, and what the prefetcher itself needs.
        """
        self._tokens += 1
        if self.note:
            self.off_tokens += 1
            if self._tokens >= self._until:
                self._begin()
            return bool(self.note)
        if read_bytes or used_bytes:
            self._bytes.append((read_bytes, used_bytes))
        if self._settled:
            (self._without if self._probing else self._with).append(took_s)
        self._advance()
        reason = self._loses()
        if reason:
            self._switch_off(reason)
        return bool(self.note)

    def _begin(self) -> None:
        """A trial."""
        self.note = ""
        self._round, self._left, self._probing, self._settled = 0, _ON, False, False
        self._rounds: deque[tuple[list[float], list[float]]] = deque(maxlen=_ROUNDS)
        self._with: deque[float] = deque(maxlen=_ON - 1)
        self._without: list[float] = []
        self._bytes: deque[tuple[int, int]] = deque(maxlen=_SEEN)
        self._right = max(self._right, 0.5)

    def _advance(self) -> None:
        """To the next token of the schedule."""
        self._settled, self._left = True, self._left - 1
        if self._left:
            return
        self._settled, self._probing = False, not self._probing
        if self._probing:
            self._left = _OFF
            return
        self._rounds.append((list(self._with), self._without))
        self._with.clear()
        self._without = []
        self._round += 1
        self._left = _ON if self._round < _ROUNDS else _BETWEEN
        if self._round == _ROUNDS:
            self._pause = _PAUSE  # it came through a whole trial

    def _loses(self) -> str:
        """Why it does not pay, in words; empty if it does, or if that cannot be told yet."""
        read, used = sum(read for read, _ in self._bytes), sum(used for _, used in self._bytes)
        if len(self._bytes) >= _SOON and read >= self._least and used < _USED * read:
            return f"of {read / 2**20:.1f} MiB read ahead {100 * used / read:.0f} % were used"
        if read and len(self._rounds) >= _ENOUGH and longer(self._rounds) > _SURE:
            ones, others = (median(chain.from_iterable(side)) for side in zip(*self._rounds, strict=True))
            if ones > _MORE * others:
                return f"with and without it a token took {1e3 * ones:.2f} and {1e3 * others:.2f} ms"
        return ""

    def _switch_off(self, reason: str) -> None:
        self.note = f"{reason}; off for {self._pause} tokens"
        self._until = self._tokens + self._pause
        self._pause = min(2 * self._pause, _LONGEST)
        self._log.info("read-ahead does not pay", seen=reason, off_for_tokens=self._until - self._tokens)


def longer(rounds: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
    """By how many standard errors the first of each pair tend to be more than the second: Mann and Whitney's rank test.

    Each round is ranked for itself (van Elteren), so that what changes over time is no difference of the two; and a
    single token that waited long, for whatever reason, counts no more than one that waited a little longer.
    """
    excess = variance = 0.0
    for ones, others in rounds:
        m, n = len(ones), len(others)
        above = sum((one > other) + 0.5 * (one == other) for one in ones for other in others)
        excess += above - m * n / 2
        variance += m * n * (m + n + 1) / 12
    return excess / math.sqrt(variance) if variance else 0.0
