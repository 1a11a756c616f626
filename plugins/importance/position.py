"""The ends of a prompt matter more than its middle: models heed the beginning of a text and what they read last.

The score falls in a straight line from 1 at either end to 0 in the middle. So, with thresholds of 0.75 and 0.35, the
first and the last eighth are major and the middle third is trivial. Needs no text and costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Importance, Options


class Position:
    """Scores token i of n by how far it is from the middle: ``|2 i / (n - 1) - 1|``."""

    def score(self, prompt: Sequence[int], text: str, spans: Sequence[tuple[int, int]], /) -> Sequence[float]:
        last = len(prompt) - 1
        return [abs(2 * index - last) / max(1, last) for index in range(last)] + [1.0]


def _build(options: Options, facts: Facts, /) -> Importance:
    return Position()


@hookimpl
def bmoe_importance() -> list[Provider[Importance]]:
    """Return the scorer that goes by position alone."""
    return [Provider("position", _build, summary="the ends of a prompt matter more than its middle")]
