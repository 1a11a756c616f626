"""What of a trace in columns is of drafts: verify batches, what the cache hears of each in the end, and guesses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bmoe.contracts import ExpertKey
from bmoe.replay.play import DraftTouch, Heard
from bmoe.replay.route_trace import ACCEPTED, DECODE, GUESS, REJECTED, VERIFY

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TURN, _PHASE, _STEP, _LAYER, _SLOT, _EXPERT, _ROUND, _PLACE = range(8)
_EXPERT_BITS = 16


@dataclass(frozen=True, slots=True)
class Drafts:
    """Columns of m touches and u uses that are heard later; touch i is followed by uses ``upto[i]`` to ``upto[i + 1]``.

    ``verified`` and ``guessed`` are bool [m], ``upto`` int64 [m + 1]. Use j has the distinct ``keys`` (int64) from
    ``starts[j]`` to ``starts[j + 1]`` (int64 [u + 1]). ``first_rows`` int64 [m] and ``heard_rows`` int64 [u] are rows
    of the file, the first of each; ``probs`` float32 [u, n_expert] or None.
    """

    verified: NDArray[np.bool_]
    guessed: NDArray[np.bool_]
    upto: NDArray[np.int64]
    keys: NDArray[np.int64]
    starts: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    heard_rows: NDArray[np.int64]
    probs: NDArray[np.float32] | None = field(default=None, repr=False)

    @property
    def batches(self) -> int:
        """How many verify batches there are."""
        return int(np.count_nonzero(np.diff(self.upto)))

    def touches(self, first: int, last: int) -> Iterator[DraftTouch | None]:
        """Of the touches from ``first`` to ``last``; None for those that are not of drafts."""
        columns = (self.verified, self.guessed)
        for at, verified, guessed in zip(range(first, last), *(c[first:last].tolist() for c in columns), strict=True):
            if not verified:
                yield DraftTouch(True, []) if guessed else None
                continue
            uses = range(int(self.upto[at]), int(self.upto[at + 1]))
            yield DraftTouch(False, [Heard(self._keys(use), self._probs(use)) for use in uses])

    def _keys(self, use: int) -> list[ExpertKey]:
        keys: list[ExpertKey] = self.keys[self.starts[use] : self.starts[use + 1]].tolist()
        return keys

    def _probs(self, use: int) -> NDArray[np.float32] | None:
        return None if self.probs is None or np.isnan(self.probs[use, 0]) else self.probs[use]


@dataclass(frozen=True, slots=True)
class Touches:
    """Rows as touches: ``keys``, ``starts`` and ``ends_token`` as :class:`~bmoe.replay.lookups.Lookups` has them.

    ``counted`` are the touches of text, ``tokens`` the tokens of it, int32 [.., 2] of turn and step.
    """

    keys: NDArray[np.int64]
    starts: NDArray[np.int64]
    counted: NDArray[np.bool_]
    ends_token: NDArray[np.bool_]
    tokens: NDArray[np.int32]
    drafts: Drafts


def drafted(rows: NDArray[np.int32]) -> bool:
    """Whether rows, int32 [n, 6 or 8], have any of drafts."""
    phases = rows[:, _PHASE]
    return bool(((phases >= ACCEPTED) & (phases <= GUESS)).any())


def with_drafts(rows: NDArray[np.int32]) -> Touches:
    """The touches of ``rows`` int32 [n, 8]: turn, phase, step, layer, slot, expert, round, place.

    The rows of a verify batch in one layer are one touch of what any of them uses, in the order of the last use, as
    the engine hands it over.
    """
    phase = rows[:, _PHASE]
    verify = (phase == ACCEPTED) | (phase == REJECTED)
    decode = rows[:, (_TURN, _PHASE, _STEP)].astype(np.int64)
    decode[verify, 1] = VERIFY
    decode[verify, 2] = rows[verify, _ROUND]
    layer = rows[:, _LAYER]
    # guesses that branch are tokens at one position
    again = (phase[1:] >= ACCEPTED) & (layer[1:] < layer[:-1])
    other = (decode[1:] != decode[:-1]).any(axis=1) | again
    rising = np.where(verify[1:], np.diff(rows[:, _PLACE]) >= 0, np.diff(rows[:, _SLOT]) > 0)
    begins = np.concatenate(([True], other | (layer[1:] != layer[:-1]) | ~rising))
    touch = np.cumsum(begins) - 1
    firsts = np.flatnonzero(begins)
    ends_token = np.concatenate((other[firsts[1:] - 1], [True]))
    decode_of = np.concatenate(([0], np.cumsum(ends_token[:-1])))

    kept = np.ones(len(rows), np.bool_)
    several = np.flatnonzero(phase >= ACCEPTED)
    kept[several] = False
    kept[several[_last(touch[several] << _EXPERT_BITS | rows[several, _EXPERT])]] = True
    every = layer.astype(np.int64) << 24 | rows[:, _EXPERT]
    starts = np.concatenate(([0], np.cumsum(np.bincount(touch[kept], minlength=len(firsts)))))

    accepted = np.flatnonzero(phase == ACCEPTED)
    accepted = accepted[np.lexsort((accepted, rows[accepted, _PLACE], decode_of[touch[accepted]]))]
    named = np.stack([rows[accepted, _PLACE], touch[accepted]], axis=1)
    opens = np.ones(len(accepted), np.bool_)
    opens[1:] = (named[1:] != named[:-1]).any(axis=1)
    use = np.cumsum(opens) - 1
    heard_rows = accepted[opens]
    first = np.sort(np.unique(use << _EXPERT_BITS | rows[accepted, _EXPERT], return_index=True)[1])
    widths = np.bincount(use[first], minlength=len(heard_rows))
    ends = decode_of[touch[heard_rows]]
    upto = np.where(ends_token, np.searchsorted(ends, decode_of, "right"), np.searchsorted(ends, decode_of, "left"))

    drafts = Drafts(
        verify[firsts],
        phase[firsts] == GUESS,
        np.concatenate(([0], upto)).astype(np.int64),
        every[accepted[first]],
        np.concatenate(([0], np.cumsum(widths))).astype(np.int64),
        firsts,
        heard_rows,
    )
    text = (phase == DECODE) | (phase == ACCEPTED)
    counted = verify[firsts] | (phase[firsts] == DECODE)
    return Touches(every[kept], starts.astype(np.int64), counted, ends_token, rows[text][:, (_TURN, _STEP)], drafts)


def _last(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each value is for the last time, in order."""
    back = np.unique(values[::-1], return_index=True)[1]
    return np.sort(len(values) - 1 - back)
