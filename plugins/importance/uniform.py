"""Every token of a prompt matters as much as the next: the measure that a scorer has to beat."""

from __future__ import annotations

from collections.abc import Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Importance, Options


class Uniform:
    """Scores every token 1."""

    def score(self, prompt: Sequence[int], text: str, spans: Sequence[tuple[int, int]], /) -> Sequence[float]:
        return [1.0] * len(prompt)


def _build(options: Options, facts: Facts, /) -> Importance:
    return Uniform()


@hookimpl
def bmoe_importance() -> list[Provider[Importance]]:
    """Return the scorer that tells no token from another."""
    return [Provider("uniform", _build, summary="every token matters alike")]
