"""Takes one conversation from position to position, and the resident run beside it, in step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bmoe.conversation import Conversation
from bmoe.costs import DecodeCost
from bmoe.errors import ModelError
from bmoe.evaluate.metrics import divergence, log_softmax

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Forced(Protocol):
    """A second run that is given the same tokens."""

    def clear(self) -> None:
        """Forget all tokens."""

    def feed(self, tokens: Sequence[int], /) -> None:
        """Decode tokens after those it holds."""

    def rewind(self, length: int, /) -> None:
        """Keep the first ``length`` tokens."""

    def logits(self) -> NDArray[np.float32]:
        """The row after the last token."""


@dataclass(frozen=True, slots=True)
class Position:
    """What the run, and the resident run if there is one, say about the next token: rows of log-probabilities."""

    run: NDArray[np.float64]
    reference: NDArray[np.float64] | None

    @property
    def best(self) -> int:
        """The likeliest token; of equals the first."""
        return int(self.run.argmax())


@dataclass(slots=True)
class Tally:
    """Sums over the positions of one item; what has no resident run beside it is not compared."""

    nlls: list[float] = field(default_factory=list)
    reference_nll: float = 0.0
    compared: int = 0
    agree: int = 0
    kl: float = 0.0

    def target(self, position: Position, token: int) -> float:
        """Count ``token`` as what really came next; returns its negative log-likelihood."""
        nll = -float(position.run[token])
        self.nlls.append(nll)
        if position.reference is not None:
            self.reference_nll -= float(position.reference[token])
        return nll

    def compare(self, position: Position) -> None:
        """Count the distance from the resident run at a position."""
        if position.reference is not None:
            self.compared += 1
            self.agree += position.best == int(position.reference.argmax())
            self.kl += divergence(position.reference, position.run)

    def scores(self) -> dict[str, float]:
        """The comparison's part of an item's scores; empty without one."""
        return {"compared": self.compared, "agree": self.agree, "kl": self.kl} if self.compared else {}


@dataclass(slots=True)
class Scorer:
    """Decodes on ``conversation`` and alike on ``reference``; ``token`` is told of every decode.

    Costs are of the conversation: ``prefill`` of prompts, ``decode`` of single tokens.
    """

    conversation: Conversation
    reference: Forced | None = None
    token: Callable[[], None] = lambda: None
    prefill: DecodeCost = field(default_factory=DecodeCost)
    decode: DecodeCost = field(default_factory=DecodeCost)

    def begin(self) -> None:
        """Start an item: no tokens, no costs."""
        self.prefill, self.decode = DecodeCost(), DecodeCost()
        self.clear()

    def clear(self) -> None:
        """Forget all tokens; the experts in memory stay."""
        self.conversation.clear()
        if self.reference is not None:
            self.reference.clear()

    def prompt(self, tokens: Sequence[int]) -> Position:
        """Decode ``tokens`` in pieces of a ubatch, as a generation does with its prompt."""
        self.prefill.add(self.conversation.feed(tokens))
        return self._reached(tokens)

    def step(self, token: int) -> Position:
        """Decode one token."""
        self.decode.add(self.conversation.feed([token], "decode"))
        return self._reached([token])

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        self.prefill.add(self.conversation.rewind(length))
        if self.reference is not None:
            self.reference.rewind(length)

    def _reached(self, tokens: Sequence[int]) -> Position:
        self.token()
        run = log_softmax(self.conversation.logits())
        if np.isnan(run).any():
            raise ModelError("the model's logits are not numbers; the file may be damaged")
        if self.reference is None:
            return Position(run, None)
        self.reference.feed(tokens)
        return Position(run, log_softmax(self.reference.logits()))
