"""Multi-token prediction: the model's own head drafts, a layer that was trained to say what comes after the next token.

Its experts are streamed like the others, from the same cache; the text so far reaches it without reading any. Source:
``graph_mtp`` of llama.cpp's src/models/glm4-moe.cpp; docs/explanation/head.md.
"""

from __future__ import annotations

from bmoe import Provider, hookimpl
from bmoe.contracts import Drafter, Facts
from bmoe_plugins.draft._branching import BranchingOptions, Guessed, branches


def _build(options: BranchingOptions, facts: Facts, /) -> Drafter:
    return Guessed(options)


@hookimpl
def bmoe_drafters() -> list[Provider[Drafter]]:
    """Return the drafter that has the model's head guess."""
    return [
        Provider(
            "mtp",
            _build,
            BranchingOptions,
            guesses="head",
            trees=branches,
            trials=({}, {"branching": 2}),
            summary="the model's own head for next-token prediction",
        )
    ]
