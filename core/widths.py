"""What a draft of a length is worth: the tokens that it is likely to give, and the seconds that its round takes.

Both are learned from rounds. Rounds of one length are few and noisy, so that every length learns from the others:
tokens are accepted one after the other, and what a round takes is nearly affine in the tokens that it verifies.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

_SAMPLES, _PLAIN = 8, 16
"""The latest rounds of each length, and without a draft, that are looked back on."""
_MEMORY, _BORROWED = 16, 2.0
"""Drafts that an acceptance is a mean of, and how many the one of the place before counts for."""
_LINE = 8.0
"""Rounds that the line through all lengths counts for beside those of the length itself."""
_DISTURBED = 2.0
"""A round that takes longer than this many times what was expected counts as one that took that: a lasting change is
followed in a few rounds, a single disturbance is not believed."""
_CHANCE = 0.002
"""A run of rejected drafts that is less likely than this means another text: what was learned of the old is void."""


class Widths:
    """``most`` is the longest draft, in tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._plain: deque[tuple[float, int]] = deque(maxlen=_PLAIN)
        self._took: dict[int, deque[float]] = {}
        self.forget_text()

    def plain_tokens(self, seconds: float, read_bytes: int) -> float:
        """How many tokens could have been had without a draft in that time, or for those reads: the more of both."""
        if not self._plain:
            return 0.0
        plain_seconds, plain_bytes = self._plain_seconds(), fmean(read for _, read in self._plain)
        by_time = seconds / plain_seconds if plain_seconds else 0.0
        return max(by_time, read_bytes / plain_bytes if plain_bytes else 0.0)

    def forget_plain(self) -> None:
        """Rounds without a draft are about to be measured anew."""
        self._plain.clear()

    def forget_text(self) -> None:
        """What was accepted so far says nothing about what comes."""
        self._tries, self._hits = [0.0] * self._most, [0.0] * self._most
        self._missed, self._usual = 0, 0.0

    def plain(self, seconds: float, read_bytes: int) -> None:
        """A round without a draft ended."""
        self._plain.append((seconds, read_bytes))

    def drafted(self, drafted: int, accepted: int, seconds: float) -> None:
        """A round with a draft ended."""
        if self._plain:
            seconds = min(seconds, _DISTURBED * self._seconds(drafted, self._line()))
        self._took.setdefault(drafted, deque(maxlen=_SAMPLES)).append(seconds)
        for place in range(min(accepted + 1, drafted, self._most)):
            self._tries[place] += 1 - self._tries[place] / _MEMORY
            self._hits[place] += (place < accepted) - self._hits[place] / _MEMORY
        self._watch(accepted)

    def best(self) -> tuple[int, float]:
        """The length with the most tokens per second, and how many times those without a draft that is; (0, 1) if none.

        It needs a round with a draft and one without.
        """
        found = (0, 1.0)
        if not self._plain or not self._took:
            return found
        plain = self._plain_seconds()
        line = self._line()
        tokens = likely = 1.0
        for length, chance in enumerate(self._chances(), 1):
            likely *= chance
            tokens += likely
            utility = tokens * plain / max(self._seconds(length, line), 1e-12)
            if length == 1 or utility > found[1]:
                found = (length, utility)
        return found

    def _plain_seconds(self) -> float:
        return median(seconds for seconds, _ in self._plain)

    def _chances(self) -> list[float]:
        """That the token at each place is accepted if those before it were."""
        chances, before, borrowed = [], 0.5, 1.0
        for tries, hits in zip(self._tries, self._hits, strict=True):
            before = (hits + borrowed * before) / (tries + borrowed)
            borrowed = _BORROWED
            chances.append(before)
        return chances

    def _watch(self, accepted: int) -> None:
        """For a change of text, which the means would be slow to follow."""
        if accepted:
            self._missed, self._usual = 0, self._chances()[0]
            return
        self._missed += 1
        if self._missed > 1 and (1 - self._usual) ** self._missed < _CHANCE:
            missed = self._missed
            self.forget_text()
            self._tries[0] = missed

    def _line(self) -> tuple[float, float]:
        """Seconds without a draft, and more for each drafted token: least squares over the median of each length."""
        points = [(0, self._plain_seconds(), len(self._plain))]
        points += [(length, median(took), len(took)) for length, took in self._took.items()]
        weight = sum(count for *_, count in points)
        at = sum(length * count for length, _, count in points) / weight
        level = sum(seconds * count for _, seconds, count in points) / weight
        spread = sum(count * (length - at) ** 2 for length, _, count in points)
        rise = sum(count * (length - at) * (seconds - level) for length, seconds, count in points)
        slope = max(rise / spread, 0.0) if spread else 0.0  # longer drafts are never quicker: that is noise
        return level - slope * at, slope

    def _seconds(self, length: int, line: tuple[float, float]) -> float:
        start, slope = line
        took = self._took.get(length, ())
        own = median(took) if took else 0.0
        return (len(took) * own + _LINE * (start + slope * length)) / (len(took) + _LINE)
