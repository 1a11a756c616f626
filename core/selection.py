"""Which plugins a profile names, and what to say of a name that nothing provides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from bmoe.problems import suggest, toml_value
from bmoe.profile import Profile

_NOUNS = {
    "arch": "an architecture",
    "cache": "a cache policy",
    "fetch": "a fetcher",
    "prefetch": "a prefetcher",
    "dense": "a dense placement",
    "routing": "a routing policy",
    "importance": "an importance scorer",
    "draft": "a drafter",
    "sink": "a sink",
}


class Selection(NamedTuple):
    """A name that a profile chooses, its table of options, and the TOML paths of both."""

    kind: str
    name: str
    path: str
    options: Mapping[str, Any]
    options_path: str


def selections(profile: Profile) -> list[Selection]:
    """Every plugin that ``profile`` names, "auto" included, in the order of the engine's construction."""
    cache, fetch, dense, prefetch, draft = profile.cache, profile.fetch, profile.dense, profile.prefetch, profile.draft
    chosen = [
        _selection("cache", cache.policy, "cache", "policy", cache.options),
        _selection("fetch", fetch.plugin, "fetch", "plugin", fetch.options),
        _selection("dense", dense.placement, "dense", "placement", dense.options),
    ]
    if prefetch:
        chosen.append(_selection("prefetch", prefetch.policy, "prefetch", "policy", prefetch.options))
    if draft:
        chosen.append(_selection("draft", draft.drafter, "draft", "drafter", draft.options))
    for index, knob in enumerate(profile.routing):
        chosen.append(_selection("routing", knob.plugin, f"routing.{index}", "plugin", knob.options))
        scorer, options = knob.options.get("importance"), knob.options.get("importance_options")
        if isinstance(scorer, str):  # if it is something else, the policy says so
            path, table = f"routing.{index}.options.importance", options if isinstance(options, Mapping) else {}
            chosen.append(Selection("importance", scorer, path, table, f"{path}_options"))
    for index, sink in enumerate(profile.sink):
        chosen.append(_selection("sink", sink.plugin, f"sink.{index}", "plugin", sink.options))
    return chosen


def _selection(kind: str, name: str, table: str, key: str, options: Mapping[str, Any]) -> Selection:
    return Selection(kind, name, f"{table}.{key}", options, f"{table}.options")


def unknown_name(profile: Profile, chosen: Selection, known: Iterable[str], installed: Collection[str]) -> str:
    """The problem of a name that nothing provides; ``installed`` are the plugins that could be enabled."""
    said = f"{profile.where(chosen.path)} = {toml_value(chosen.name)} is not {_NOUNS[chosen.kind]}"
    plugin, dot, _ = chosen.name.partition(".")
    if not dot or plugin in profile.plugins.enable:
        return f"{said}; {suggest(chosen.name, known)}"
    if plugin in installed:
        return f"{said} of bmoe; add {toml_value(plugin)} to plugins.enable"
    return f"{said} of bmoe, and no plugin {toml_value(plugin)} is installed; {suggest(chosen.name, known)}"
