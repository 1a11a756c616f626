"""How many tokens to draft next, none included: what was measured decides.

A trial begins with a draft of one token. If it is rejected the trial is over, whatever it took: nothing accepted never
pays. Else drafts double as long as everything is accepted: a verify hardly costs more than its tokens one by one. From
the first rejection on the length with the most tokens per second is drafted, or none if no length beats a plain decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from bmoe.log import get_logger
from bmoe.widths import Widths

_MEASURED = 3
"""Rounds without a draft that measure what drafting has to beat: enough for a median."""
_RENEW, _RARELY = 8, 64
"""Rounds with drafts until that is measured anew, doubled each time: the first were with a cold cache, in which every
draft seems to pay."""
_PAYS = 1.05
"""Times the tokens per second without a draft, from which on drafting pays: less is noise."""
_GROWING = 8
"""Rounds that a draft may grow, or stay at its longest, before the clock is asked: by then acceptance is known."""
_EXPLORE = 8
"""Every so many rounds with drafts one is longer or shorter than the best."""
_PAUSE, _LONGEST = 8, 64
"""Tokens without a draft after a trial that lost, doubled each time: the longest bounds how late a change is seen."""
_LIVED = 16
"""Rounds with drafts from which on they were no trial but paid: the next pause is the shortest again."""
_SHARE, _ADVANCE = 0.03, 200
"""What trials may cost, as a share of the tokens so far, or of this many tokens while there are fewer."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of speculative decoding: draft, verify, follow.

    ``drafted`` tokens were proposed and verified, 0 in a plain decode or if the drafter had nothing; of them
    ``accepted`` were right, so that the round gave one token more than that. ``seconds`` is the wall time of all of it,
    ``read_bytes`` what it read. ``decodes`` counts in decodes of the model: 1 for the verify, and the steps of the
    draft by their share of the model.
    """

    drafted: int
    accepted: int
    seconds: float
    read_bytes: int
    decodes: float


class _Phase(Enum):
    MEASURING = auto()  # without a draft
    TRYING = auto()
    GROWING = auto()
    DRAFTING = auto()
    OFF = auto()


class DraftLength:
    """``most`` is the longest draft; ``governor`` is "auto", or "fixed" for always ``most``.

    Raises ValueError for any other governor, and for a ``most`` below 0.
    """

    def __init__(self, most: int, *, governor: str = "auto") -> None:
        if governor not in {"auto", "fixed"}:
            raise ValueError(f"governor = {governor!r}: use 'auto' or 'fixed'")
        if most < 0:
            raise ValueError(f"most = {most}: use 0 or more")
        self._most, self._fixed = most, governor == "fixed" or not most
        self._widths = Widths(most)
        self._limit, self._phase, self._left = 0, _Phase.MEASURING, _MEASURED
        self._tokens, self._off_rounds, self._pause = 0, 0, _PAUSE
        self._renew, self._unrenewed = _RENEW, 0
        self._spent, self._dearest = 0.0, 0.0
        self._rounds, self._period = 0, 0.0
        self._log = get_logger()

    @property
    def limit(self) -> int:
        """Tokens to draft in the next round, 0 to ``most``."""
        return self._most if self._fixed else self._limit

    @property
    def off_rounds(self) -> int:
        """Rounds in which the limit was 0 because drafting did not pay; those that measure are not counted."""
        return self._off_rounds

    def ended(self, round: Round) -> None:  # noqa: A002 - it is one
        """Learn from a round that was asked for with :attr:`limit`."""
        if self._fixed:
            return
        self._tokens += round.accepted + 1
        # a draft that took decodes and proposed nothing is as good as one rejected token; a free one never happened
        drafted = round.drafted or int(round.decodes > 1)
        if drafted:
            self._widths.drafted(drafted, round.accepted, round.seconds)
        else:
            self._widths.plain(round.seconds, round.read_bytes)
        if not self._limit:
            self._plain_ended()
        elif drafted:
            self._draft_ended(round, drafted)

    def _plain_ended(self) -> None:
        self._off_rounds += self._phase is _Phase.OFF
        self._left -= 1
        if self._left > 0:
            return
        if self._phase is _Phase.MEASURING and self._rounds:
            self._phase, self._unrenewed = _Phase.DRAFTING, 0
            self._choose(just_measured=True)
        elif self._spent + self._dearest <= _SHARE * max(self._tokens, _ADVANCE):
            self._widths.forget_text()
            self._limit, self._phase, self._rounds, self._period = 1, _Phase.TRYING, 0, 0.0

    def _draft_ended(self, done: Round, drafted: int) -> None:
        self._rounds += 1
        self._unrenewed += 1
        everything = done.accepted == drafted
        if self._phase is _Phase.TRYING:
            self._dearest = max(self._dearest, _at_worst(done, drafted) + done.accepted)
            if not done.accepted:
                self._period = _at_worst(done, drafted)
                self._switch_off()
                return
            self._phase = _Phase.GROWING
        self._period += self._cost(done, drafted)
        cheap = self._period < self._rounds  # less than a token a round beyond what it gave
        if self._phase is _Phase.GROWING and everything and cheap and self._rounds < _GROWING:
            self._limit = min(2 * self._limit, self._most)
            return
        self._phase = _Phase.DRAFTING
        self._choose(everything=everything)

    def _choose(self, *, everything: bool = False, just_measured: bool = False) -> None:
        """The next limit; ``everything``: the last draft was accepted to its end."""
        best, utility = self._widths.best()
        pays = utility >= _PAYS
        if not just_measured and (not pays or self._unrenewed >= self._renew):
            self._measure()
        elif not pays:
            self._switch_off()
        elif self._rounds % _EXPLORE == 0 and not just_measured:
            step = max(best // 2, 1)
            self._limit = min(best + step, self._most) if everything else max(best - step, 1)
        else:
            self._limit = best

    def _measure(self) -> None:
        """Without a draft, also before it is switched off: that it does not pay may be old news or noise."""
        if self._unrenewed >= self._renew:
            self._renew = min(2 * self._renew, _RARELY)
        self._widths.forget_plain()
        self._limit, self._phase, self._left = 0, _Phase.MEASURING, _MEASURED

    def _switch_off(self) -> None:
        if self._rounds >= _LIVED:
            self._pause = _PAUSE
        else:
            self._spent += self._period
        self._limit, self._phase, self._left = 0, _Phase.OFF, self._pause
        self._log.debug("drafting does not pay", off_for_tokens=self._pause)
        self._pause = min(2 * self._pause, _LONGEST)

    def _cost(self, done: Round, drafted: int) -> float:
        """What a round with a draft cost beyond its tokens, in tokens without one."""
        without = max(self._widths.plain_tokens(done.seconds, done.read_bytes), done.decodes)
        return min(max(without - done.accepted - 1, 0.0), _at_worst(done, drafted))


def _at_worst(done: Round, drafted: int) -> float:
    """The same if a rejected token reads as much as any other: it holds whatever the noise of a measurement."""
    return drafted - done.accepted + done.decodes - 1
