"""How much each token of a prompt matters: its text laid out for a scorer, and what that says, checked and scaled."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bmoe.choices import chosen_at, of_option
from bmoe.contracts import Importance
from bmoe.errors import PluginError
from bmoe.plan import Plan
from bmoe.problems import cause, one_line


def laid_out(pieces: Sequence[bytes]) -> tuple[str, list[tuple[int, int]]]:
    """The text of tokens, and where each lies in it, in characters, half-open.

    A token with a part of a character has that whole character; one without text has an empty span. A byte that is no
    text becomes one U+FFFD.
    """
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    owners: list[int] = []
    for index, character in enumerate(text):
        owners += [index] * (1 if _is_stray(character) else len(character.encode()))
    owners.append(len(text))
    spans, at = [], 0
    for piece in pieces:
        begin, end = owners[at], owners[at]
        if piece:
            at += len(piece)
            end = owners[at - 1] + 1
        spans.append((begin, end))
    shown = "".join("\ufffd" if _is_stray(character) else character for character in text)
    return shown, spans


def scored(scorer: Importance, plan: Plan, prompt: Sequence[int], pieces: Sequence[bytes]) -> tuple[float, ...]:
    """The scores of a prompt whose tokens have these bytes; the greatest finite one is 1, infinite ones stay.

    Where all finite ones are 0 they are 1: no token matters less than another. Raises PluginError in one line, with
    the place in the profile that names the scorer, if it fails or its scores are none.
    """
    choice = plan.importance
    assert choice is not None
    said = chosen_at(plan.profile, choice)
    text, spans = laid_out(pieces)
    try:
        scores = [float(score) for score in scorer.score(prompt, text, spans)]
    except PluginError as exc:
        raise PluginError(of_option(plan.profile, choice, exc) or f"{said}: {one_line(exc)}") from exc
    except Exception as exc:
        raise PluginError(f"{said} cannot score this prompt; choose another, or correct it ({cause(exc)})") from exc
    if len(scores) != len(prompt):
        raise PluginError(f"{said} gives {len(scores)} scores for {len(prompt)} tokens; correct the plugin")
    wrong = next((at for at, score in enumerate(scores) if not score >= 0), None)
    if wrong is not None:
        raise PluginError(f"{said} gives token {wrong} the score {scores[wrong]}; correct the plugin: 0 or more")
    top = max((score for score in scores if score < math.inf), default=0.0)
    return tuple(score if score == math.inf else score / top if top else 1.0 for score in scores)


def _is_stray(character: str) -> bool:
    """Whether it stands for a byte that is no text."""
    return "\udc80" <= character <= "\udcff"
