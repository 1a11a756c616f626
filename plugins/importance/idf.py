"""Tokens that are rare in the prompt matter more: what a text repeats says less each time.

The score of a token is the inverse document frequency with the prompt's tokens as the documents: ``log(n / c)`` for a
token that is ``c`` of the ``n`` tokens of the prompt. Source: Spärck Jones, 1972, of words over documents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Importance, Options


class Idf:
    """Scores each token by how rare it is among the prompt's own."""

    def score(self, prompt: Sequence[int], text: str, spans: Sequence[tuple[int, int]], /) -> Sequence[float]:
        counts, whole = Counter(prompt), len(prompt)
        return [math.log(whole / counts[token]) for token in prompt]


def _build(options: Options, facts: Facts, /) -> Importance:
    return Idf()


@hookimpl
def bmoe_importance() -> list[Provider[Importance]]:
    """Return the scorer by rarity."""
    return [Provider("idf", _build, summary="tokens that are rare in the prompt matter more")]
