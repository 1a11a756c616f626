"""Text that is drafted without a model: how much of a draft is accepted, and what its round costs, are given.

A plain token takes 1 second, reads ``PLAIN_BYTES`` and is one decode.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from bmoe.draftlength import DraftLength, Round

PLAIN_BYTES = 1_000_000


def never(_: int) -> float:
    return 0.0


def always(_: int) -> float:
    return 1.0


def each(chance: float) -> Callable[[int], float]:
    return lambda _: chance


def turns(at: int, before: float, after: float) -> Callable[[int], float]:
    return lambda token: before if token < at else after


@dataclass(frozen=True)
class World:
    """``accepts``: chance of a drafted token, given that those before it were accepted, by its place in the text.

    ``slope``: seconds and bytes of each further token that a decode verifies, in those of a plain one. ``share``: the
    same of a step of the draft. ``knows``: chance that the drafter proposes anything. ``noise``: every round takes up
    to that share more or less; ``outliers``: chance that one takes ten times as long.
    """

    accepts: Callable[[int], float] = always
    slope: float = 0.1
    bytes_slope: float | None = None
    share: float = 0.0
    knows: float = 1.0
    noise: float = 0.0
    outliers: float = 0.0
    cold_tokens: int = 0
    """The first of them take three times as long."""

    def seconds(self, drafted: int) -> float:
        return 1 + (self.slope + self.share) * drafted

    def read(self, drafted: int) -> int:
        slope = self.slope if self.bytes_slope is None else self.bytes_slope
        return int(PLAIN_BYTES * (1 + (slope + self.share) * drafted))

    def speed(self, drafted: int, chance: float) -> float:
        """Tokens per second of always drafting that many."""
        return sum(chance**place for place in range(drafted + 1)) / self.seconds(drafted)


@dataclass
class Run:
    """What a text took; ``seconds`` without the noise, which is the same with and without a governor."""

    tokens: int = 0
    seconds: float = 0.0
    read_bytes: int = 0
    decodes: float = 0.0
    limits: list[int] = field(default_factory=list)
    began: list[int] = field(default_factory=list)
    """The token at which each round began."""

    def since(self, token: int) -> list[int]:
        return [limit for limit, at in zip(self.limits, self.began, strict=True) if at >= token]

    def first_on(self, token: int) -> int:
        """Tokens from ``token`` on until a draft of more than one, which only follows one that was accepted."""
        return next(at - token for limit, at in zip(self.limits, self.began, strict=True) if at >= token and limit > 1)


def simulate(length: DraftLength, world: World, tokens: int, seed: int = 0) -> Run:
    """Decode at least so many tokens."""
    chance, run = random.Random(seed), Run()
    while run.tokens < tokens:
        drafted = length.limit if chance.random() < world.knows else 0
        accepted = 0
        while accepted < drafted and chance.random() < world.accepts(run.tokens + accepted):
            accepted += 1
        seconds, decodes = world.seconds(drafted), 1 + world.share * drafted
        seconds *= 3 if run.tokens < world.cold_tokens else 1
        noisy = seconds * chance.uniform(1 - world.noise, 1 + world.noise)
        noisy *= 10 if chance.random() < world.outliers else 1
        run.limits.append(length.limit)
        run.began.append(run.tokens)
        run.tokens += accepted + 1
        run.seconds += seconds
        run.read_bytes += world.read(drafted)
        run.decodes += decodes
        length.ended(Round(drafted, accepted, noisy, world.read(drafted), decodes))
    return run
