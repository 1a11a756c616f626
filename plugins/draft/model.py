"""Another, smaller model drafts: any gguf with the same vocabulary, which is held in memory beside the cache."""

from __future__ import annotations

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import Drafter, Facts
from bmoe_plugins.draft._branching import BranchingOptions, Guessed, branches


class ModelOptions(BranchingOptions):
    """Which model."""

    model: str = Field(min_length=1, description="its gguf file, the first of several")


def _build(options: ModelOptions, facts: Facts, /) -> Drafter:
    return Guessed(options)


@hookimpl
def bmoe_drafters() -> list[Provider[Drafter]]:
    """Return the drafter that has another model guess."""
    return [
        Provider(
            "model",
            _build,
            ModelOptions,
            guesses="model",
            trees=branches,
            summary="another model with the same vocabulary",
        )
    ]
