"""Who takes part in a comparison: a cache policy by name with its options, LRU, or Belady's rule; and one replay of it.

A contender is found anew wherever it plays, so that what travels to another process is names and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from bmoe.contracts import CacheFacts, CachePolicy, Facts, FetchFacts, ModelFacts, Options, Provider
from bmoe.errors import BmoeError, PluginError
from bmoe.plugins import load_all
from bmoe.problems import cause, dotted, explain, one_line, suggest, toml_value
from bmoe.registry import load_registry
from bmoe.replay.furthest import play_belady
from bmoe.replay.lookups import Lookups
from bmoe.replay.play import Played, play, play_lru

LRU, BELADY, OPTIMUM, OFF = "lru", "belady", "optimum", "none"
RULES: Mapping[str, bool] = {BELADY: True, OPTIMUM: False}
"""The names that are no plugins: Belady's rule, keeping the whole layer in flight or its routing alone."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy by the name of its provider (or one of :data:`RULES`), with options; ``label`` is what a user wrote.

    ``enable`` names the installed plugins that are loaded to find it.
    """

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    enable: tuple[str, ...] = ()

    def checked(self) -> Contender:
        """This contender if it can be built; else :class:`PluginError` says in one line why not."""
        if self.name in RULES:
            if self.options:
                raise PluginError(f"--policy {self.label}: {self.name} has no options; leave them out")
            return self
        self._provided()
        return self

    def play(self, trace: Lookups, budget_bytes: int, model: ModelFacts | None = None, seed: int = 0) -> Played:
        """One exact replay. ``model`` is what the policy is told, by default what the trace knows of it.

        Raises :class:`PluginError` if the policy fails, or names a victim that is none.
        """
        if self.name in RULES:
            return play_belady(trace, budget_bytes, whole_layer=RULES[self.name])
        if self.name == LRU and trace.drafts is None:
            return play_lru(trace, budget_bytes)
        budget = 0 if self.name == OFF else budget_bytes  # what it stands for is a cache that is off
        policy = self.built(trace, budget, model, seed)
        try:
            return play(policy, trace, budget)
        except BmoeError as error:
            raise PluginError(f"--policy {self.label}: {error}") from error
        except Exception as error:  # whatever a plugin raises is its own failure
            raise PluginError(
                f"--policy {self.label}: fails in a replay ({cause(error)}); correct the plugin"
            ) from error

    def _provided(self) -> tuple[Provider[CachePolicy], Options]:
        catalog = load_all(load_registry(), self.enable, "--enable")
        providers = catalog.providers["cache"]
        provider = providers.get(self.name)
        if provider is None:
            plugin, dot, _ = self.name.partition(".")
            remedy = suggest(self.name, [*providers, *RULES])
            if dot and plugin not in self.enable:
                remedy = f"if an installed plugin has it, add --enable {plugin}; {remedy}"
            raise PluginError(f"--policy {self.label}: {toml_value(self.name)} is no cache policy; {remedy}")
        try:
            return provider, provider.options.model_validate(dict(self.options))
        except ValidationError as error:
            found = explain(
                error, provider.options, dict(self.options), lambda at: f"--policy {self.name}:{dotted(at)}"
            )
            raise PluginError("\n".join(found.values())) from error
        except Exception as error:  # a plugin's validator may raise anything
            raise PluginError(f"--policy {self.label}: options cannot be checked ({cause(error)})") from error

    def built(self, trace: Lookups, budget_bytes: int, model: ModelFacts | None = None, seed: int = 0) -> CachePolicy:
        """A fresh policy. Raises :class:`PluginError` if it cannot be built, or asks for what no trace holds."""
        provider, options = self._provided()
        facts = _facts(trace, budget_bytes, model or trace.facts(), seed)
        try:
            policy = provider.build(options, facts)
            wants: Sequence[str] = sorted(getattr(policy, "wants", ()))
        except BmoeError:
            raise
        except Exception as error:  # as above
            raise PluginError(f"--policy {self.label}: cannot be built ({cause(error)}); correct the plugin") from error
        if wants and not hasattr(policy, "observe"):
            raise PluginError(f"--policy {self.label}: wants to observe and has no observe(); correct the plugin")
        lacking = [name for name in wants if name not in ("topk", "probs")]
        if lacking:
            named = one_line(", ".join(lacking))
            raise PluginError(f"--policy {self.label}: observes {named}, which a routing trace lacks; choose another")
        if "probs" in wants and trace.probs is None:
            raise PluginError(
                f"--policy {self.label}: observes probs, which {trace.source} lacks; record a trace with them: "
                "bmoe trace route -o FILE.parquet"
            )
        return policy


def _facts(trace: Lookups, budget_bytes: int, model: ModelFacts, seed: int) -> Facts:
    """What a policy is told of its place: exact bytes of entries, where the engine counts whole pages."""
    largest = max(trace.entry_bytes.values())
    everything = sum(bank.n_expert for bank in model.banks)
    cache = CacheFacts(budget_bytes, min(everything, budget_bytes // largest), trace.cycle, seed)
    return Facts(model, cache, FetchFacts(paths=(), lanes=1, direct=False, batch=1))
