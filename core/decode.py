"""Prefill and the token loop over one context: what is decoded, in which order, and what each decode cost."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bmoe.contracts import Phase
from bmoe.native.model import Context
from bmoe.native.sampler import Sampler


@dataclass(slots=True)
class DecodeCost:
    """What decodes cost, as sums: seconds, look-ups and bytes. Streaming figures are None without streaming.

    ``read_bytes`` were read because they were needed, ``ahead_bytes`` because a prefetcher suggested them, of which
    ``wasted_bytes`` were given up unused and ``used_ahead_bytes`` used; in ``off`` decodes there were no guesses, since
    they did not pay. Of routing policies: slots that they ``dropped`` or ``substituted``, and the router mass ``lost``
    over so many ``routings`` of tokens; ``worst_loss`` is the greatest of a token, not a sum.
    """

    decodes: int = 0
    decode_s: float = 0.0
    cpu_s: float = 0.0
    read_wait_s: float | None = None
    manage_s: float | None = None
    lookups: int | None = None
    hits: int | None = None
    read_bytes: int | None = None
    evictions: int | None = None
    rereads: int | None = None
    ahead_bytes: int | None = None
    wasted_bytes: int | None = None
    used_ahead_bytes: int | None = None
    off: int | None = None
    dropped: int | None = None
    substituted: int | None = None
    routings: int | None = None
    lost: float | None = None
    worst_loss: float | None = None
    tokens: int = 0

    def add(self, other: DecodeCost) -> None:
        """Add another decode's cost; what either has measured is kept."""
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            both = max if name == "worst_loss" else operator.add
            setattr(self, name, theirs if mine is None else mine if theirs is None else both(mine, theirs))

    @property
    def lost_mass(self) -> float | None:
        """The share of the router's mass that was lost, 0 to 1: the mean over tokens and their routings."""
        return self.lost / self.routings if self.routings and self.lost is not None else None


Decode = Callable[[Sequence[int], Phase], DecodeCost]
"""Runs one llama_decode of at most one ubatch; raises whatever stopped it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One chosen token and the cost of the decode that its logits came from."""

    token: int
    cost: DecodeCost
    is_end: bool


def prefill(
    decode: Decode, tokens: Sequence[int], ubatch: int, total: DecodeCost, phase: Phase = "prefill"
) -> DecodeCost:
    """Decode the prompt in pieces of ``ubatch`` tokens, so that it can be stopped between them; adds to ``total``."""
    for start in range(0, len(tokens), ubatch):
        total.add(decode(tokens[start : start + ubatch], phase))
    return total


def token_loop(
    decode: Decode,
    context: Context,
    sampler: Sampler,
    prompt_cost: DecodeCost,
    limit: int,
    digest: hashlib._Hash | None,
) -> Iterator[Step]:
    """Choose up to ``limit`` tokens; each is decoded only when the one after it is asked for.

    ``digest`` is fed the float32 logits row of every token chosen, in order. A token that ends the text is the last.
    """
    cost = prompt_cost
    for index in range(limit):
        if digest is not None:
            digest.update(context.logits().tobytes())
        token = sampler.next(context)
        end = context.model.is_end(token)
        yield Step(token, cost, end)
        if end or index + 1 == limit:
            return
        cost = decode([token], "decode")
