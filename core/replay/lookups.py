"""A routing trace in columns: what was looked up, in which order, and how many bytes each entry has.

The form for long traces: ten million look-ups are arrays of 100 MB and not as many objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bmoe.contracts import BankFacts, ModelFacts, ProjectionFacts
from bmoe.replay.play import DraftTouch, Touch
from bmoe.replay.rounds import Drafts, drafted, with_drafts

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK = 1 << 15


@dataclass(frozen=True, slots=True)
class Lookups:
    """A trace of n look-ups in m touches, a touch being one layer of one token, or of the batch that verifies a draft.

    ``keys`` int64 [n] are :data:`~bmoe.contracts.ExpertKey`, distinct within a touch; touch i has those from
    ``starts[i]`` to ``starts[i + 1]`` (int64 [m + 1]). Per touch (bool [m]): ``counted`` says whether its hits are
    figures of the trace, ``ends_token`` that the next one belongs to another token. ``tokens`` are those that are
    counted, None where the trace does not tell them apart. ``entry_bytes`` are the bytes of one expert, by layer.
    ``n_used`` are the experts per token of the recording, which may be fewer than the model's own. ``probs``, float32
    [m, n_expert], is what the router gave to every expert, NaN where a touch has none; None where no touch has any.
    ``drafts`` tells which touches are of drafts, None where none is; its tokens are those that became text.
    """

    source: str
    model: str
    arch: str
    n_layer: int
    n_expert: int
    n_used: int
    keys: NDArray[np.int64]
    starts: NDArray[np.int64]
    counted: NDArray[np.bool_]
    ends_token: NDArray[np.bool_]
    tokens: int | None
    entry_bytes: Mapping[int, int]
    probs: NDArray[np.float32] | None = None
    drafts: Drafts | None = None

    def touches(self) -> Iterator[Touch]:
        """Every touch in order, as plain Python objects, which are made a few thousand at a time."""
        sizes = self.touch_entry_bytes()
        for first in range(0, len(self.counted), _CHUNK):
            last = min(first + _CHUNK, len(self.counted))
            bounds = self.starts[first : last + 1]
            keys = self.keys[bounds[0] : bounds[-1]].tolist()
            ends = (bounds - bounds[0]).tolist()
            rest = zip(
                sizes[first:last].tolist(),
                self.counted[first:last].tolist(),
                self.ends_token[first:last].tolist(),
                strict=True,
            )
            shown = itertools.repeat(None) if self.probs is None else map(_seen, self.probs[first:last])
            drafts: Iterator[DraftTouch | None] = itertools.repeat(None)
            if self.drafts is not None:
                drafts = self.drafts.touches(first, last)
            begin = 0
            for end, (size, counted, ends_token), probs, draft in zip(ends[1:], rest, shown, drafts, strict=False):
                yield Touch(keys[begin:end], size, counted, ends_token, probs, draft)
                begin = end

    def touch_entry_bytes(self) -> NDArray[np.int64]:
        """Bytes of one entry, per touch."""
        table = np.zeros(max(self.entry_bytes, default=0) + 1, np.int64)
        for layer, nbytes in self.entry_bytes.items():
            table[layer] = nbytes
        found: NDArray[np.int64] = table[self.keys[self.starts[:-1]] >> 24]
        return found

    @property
    def cycle_bytes(self) -> int:
        """The token cycle: the most bytes of experts that one counted decode uses; 0 if none is counted."""
        nbytes = np.where(self.counted, np.diff(self.starts) * self.touch_entry_bytes(), 0)
        firsts = np.flatnonzero(np.concatenate(([True], self.ends_token[:-1])))
        return int(np.add.reduceat(nbytes, firsts).max()) if len(nbytes) else 0

    @property
    def cycle(self) -> int:
        """The token cycle in entries."""
        entries = np.where(self.counted, np.diff(self.starts), 0)
        firsts = np.flatnonzero(np.concatenate(([True], self.ends_token[:-1])))
        return int(np.add.reduceat(entries, firsts).max()) if len(entries) else 0

    def facts(self) -> ModelFacts:
        """What the trace tells of its model, for a policy that asks; shards, dense weights and vocabulary are empty."""
        banks = tuple(
            BankFacts(layer, 0, self.n_expert, min(self.n_used, self.n_expert), _one_projection(layer, nbytes))
            for layer, nbytes in sorted(self.entry_bytes.items())
            if nbytes
        )
        return ModelFacts(
            self.model, self.model, self.arch, (), self.n_layer, self.n_expert, self.n_used, 0, 0, 0, 0, banks, ()
        )


def _seen(probs: NDArray[np.float32]) -> NDArray[np.float32] | None:
    return None if np.isnan(probs[0]) else probs


def _one_projection(layer: int, nbytes: int) -> tuple[ProjectionFacts]:
    return (ProjectionFacts(f"blk.{layer}.ffn_exps.weight", "ffn_exps", 0, 0, nbytes, "unknown"),)


def in_columns(
    rows: NDArray[np.int32],
    *,
    decode: int,
    source: str,
    model: str,
    arch: str,
    n_layer: int,
    n_expert: int,
    n_used: int,
    entry_bytes: Mapping[int, int],
) -> Lookups:
    """Look-ups of ``rows`` int32 [n, 6]: turn, phase, step, layer, slot, expert, in the order of the routings.

    Rows of one token in one layer with rising slots are a touch. Those of phase ``decode`` are counted. Rows of drafts
    need two columns more, round and place.
    """
    if drafted(rows):
        found = with_drafts(rows)
        named = found.tokens
        count = None if (named[:, 1] < 0).any() else len(np.unique(named, axis=0))
        return Lookups(
            source, model, arch, n_layer, n_expert, n_used, found.keys, found.starts, found.counted, found.ends_token,
            count, dict(entry_bytes), drafts=found.drafts,
        )  # fmt: skip
    same = (rows[1:, :4] == rows[:-1, :4]).all(axis=1) & (rows[1:, 4] > rows[:-1, 4])
    inner = np.flatnonzero(~same) + 1
    starts = np.concatenate(([0], inner, [len(rows)])).astype(np.int64) if len(rows) else np.zeros(1, np.int64)
    heads = rows[starts[:-1]]
    ends = np.ones(len(heads), np.bool_)
    ends[:-1] = (heads[1:, :3] != heads[:-1, :3]).any(axis=1)
    counted = heads[:, 1] == decode
    named = heads[counted][:, (0, 2)]
    tokens = None if (named[:, 1] < 0).any() else len(np.unique(named, axis=0))
    keys = rows[:, 3].astype(np.int64) << 24 | rows[:, 5]
    return Lookups(
        source, model, arch, n_layer, n_expert, n_used, keys, starts, counted, ends, tokens, dict(entry_bytes)
    )
