"""The model drafts for itself with fewer experts: by default those alone that are in memory, so that it reads nothing.

The draft is another text than the model's own now and then; what is accepted is not. Source of the idea: S²-MoE's
self-drafting, docs/explanation/drafting.md.
"""

from __future__ import annotations

from pydantic import Field

from bmoe import Provider, hookimpl
from bmoe.contracts import Drafter, Facts, Routing
from bmoe.errors import PluginError
from bmoe_plugins.draft._branching import BranchingOptions, Guessed, branches


class SelfOptions(BranchingOptions):
    """Which experts a guess may use."""

    experts: int = Field(default=0, ge=0, description="experts per token; 0 = as many as the model itself uses")
    resident: bool = Field(default=True, description="whether those in memory alone are used")


class Fewer:
    """The best experts of each token, of those in memory if so; one at least."""

    phases = frozenset({"draft"})
    wants: frozenset[str] = frozenset()

    def __init__(self, experts: int, resident: bool) -> None:
        self._experts, self._resident = experts, resident

    def apply(self, routing: Routing, /) -> None:
        most = self._experts or routing.ids.shape[1]
        if not self._resident:
            routing.dead[:, most:] = True
            return
        for token, ranked in enumerate(routing.ranking):
            here = ranked[routing.resident[ranked]][:most]
            chosen = here if len(here) else ranked[:1]
            routing.ids[token, : len(chosen)] = chosen
            routing.dead[token, len(chosen) :] = True


class Self(Guessed):
    """Guesses of the model under :class:`Fewer`."""

    def __init__(self, options: SelfOptions) -> None:
        super().__init__(options)
        self.routing = Fewer(options.experts, options.resident)


def _build(options: SelfOptions, facts: Facts, /) -> Drafter:
    most = max((bank.n_used for bank in facts.model.banks), default=options.experts)
    if options.experts > most:
        said = f"options.experts = {options.experts} is above the {most} experts that a token uses"
        raise PluginError(f"{said}; give at most {most}")
    return Self(options)


@hookimpl
def bmoe_drafters() -> list[Provider[Drafter]]:
    """Return the drafter that is the model itself with fewer experts."""
    return [
        Provider(
            "self",
            _build,
            SelfOptions,
            guesses="trunk",
            trees=branches,
            trials=({}, {"experts": 1, "resident": False}, {"branching": 2}),
            summary="the model itself with the experts in memory alone",
        )
    ]
