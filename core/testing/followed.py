"""A trunk that its model's head follows, with no conversation around them: for tests and measurements of the head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bmoe.contracts import BatchContext, Phase
from bmoe.costs import DecodeCost
from bmoe.engine import Engine
from bmoe.head import DraftHead
from bmoe.native.model import Context


class Followed:
    """Text that is decoded by ``trunk`` and remembered by ``head``; ``is_cancelled`` ends what the head decodes."""

    def __init__(self, engine: Engine) -> None:
        """On an engine whose plan uses the head."""
        self.engine, self.is_cancelled = engine, False
        self.trunk = Context(engine.model, engine.context_options(), callbacks=engine.seam)
        engine.close_first(self.trunk)
        self.head = DraftHead(engine, self.trunk, lambda: self.is_cancelled)

    def read(self, tokens: Sequence[int], phase: Phase = "prefill") -> tuple[int, DecodeCost]:
        """Decode text in pieces of a ubatch; the likeliest token after it, and what the trunk's decodes cost."""
        width, cost = self.engine.plan.ubatch, DecodeCost()
        for first in range(0, len(tokens), width):
            part, held = tokens[first : first + width], len(self.head)
            batch = BatchContext(phase, tuple(range(held, held + len(part))))
            cost.add(self.engine.decode(self.trunk, part, batch, lambda: False))
            self.head.remember(part)
        return int(np.argmax(self.trunk.logits())), cost

    def clear(self) -> None:
        """Forget the text."""
        self.trunk.clear()
        self.head.clear()
