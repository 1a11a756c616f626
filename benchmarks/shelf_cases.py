"""What the price list prices: every cache policy, prefetcher and routing policy, at settings worth knowing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BUDGETS_MB = (3.0, 6.4, 10.0)
"""Of 19.1 MiB of experts: little more than a token uses, a third, half. Quality is measured at the middle one."""
MIDDLE = BUDGETS_MB[1]
BEST: Mapping[str, Any] = {"cache": {"policy": "next-use"}}


@dataclass(frozen=True)
class Case:
    """One setting: ``kind`` and ``plugin`` say whose page it is on, ``tables`` are those of a profile.

    ``prompt`` cases act on prompts and are priced by what comes after one.
    """

    kind: str
    plugin: str
    label: str
    tables: Mapping[str, Any]
    lossy: bool = False
    prompt: bool = False

    @property
    def key(self) -> str:
        """Names it in the results."""
        return f"{self.kind}:{self.plugin}: {self.label}"


def knob(plugin: str, **options: Any) -> dict[str, Any]:
    """A ``[[routing]]`` table."""
    return {"plugin": plugin, "options": options}


def _cache(name: str, label: str = "default options", **options: Any) -> Case:
    return Case("cache", name, label, {"cache": {"policy": name, "options": options}})


def _ahead(name: str, label: str = "default options", **options: Any) -> Case:
    return Case("prefetch", name, label, {**BEST, "prefetch": {"policy": name, "options": options}})


def _routing(label: str, *knobs: Mapping[str, Any], budget: float | None = None, plugin: str = "") -> Case:
    tables: dict[str, Any] = {**BEST, "routing": [dict(each) for each in knobs]}
    if budget is not None:
        tables["loss"] = {"budget": budget}
    return Case("routing", plugin or knobs[0]["plugin"], label, tables, lossy=True)


def _route_ahead(depth: int) -> Case:
    ahead = {"policy": "stale-gate", "options": {"depth": depth, "worker": depth > 1}}
    tables = {**BEST, "prefetch": ahead, "routing": [knob("route-ahead", depth=depth)]}
    return Case("routing", "route-ahead", f"depth = {depth}", tables, lossy=True)


def _prompt(label: str, each: Mapping[str, Any]) -> Case:
    return Case("routing", each["plugin"], label, {**BEST, "routing": [dict(each)]}, lossy=True, prompt=True)


SCORERS = ("position", "idf", "minilm")
CACHES = tuple(map(_cache, ("lru", "lfu", "sieve", "s3fifo", "arc", "decay", "edgemoe", "next-use", "router-ema")))
PREFETCHERS = (_ahead("temporal"), _ahead("stale-gate"), _ahead("edgemoe"), _ahead("hot"))
ROUTING = (
    _routing("k = 3", knob("top-k", k=3)),
    _routing("k = 2", knob("top-k", k=2)),
    _routing("k = 3, renormalise = false", knob("top-k", k=3, renormalise=False)),
    *(_routing(f"share = {s}", knob("drop-cold", share=s)) for s in (0.3, 0.6, 0.9)),
    _routing("share = 0.6, renormalise = false", knob("drop-cold", share=0.6, renormalise=False)),
    *(_routing(f"weight = {w}", knob("substitute", weight=w)) for w in (0.06, 0.1, 0.2, 0.3, 0.5)),
    *(
        _routing(
            f'variant = "max-rank", ranks = {r}, keep = 2', knob("substitute", variant="max-rank", ranks=r, keep=2)
        )
        for r in (6, 8)
    ),
    *(
        _routing(f'variant = "cumulative", mass = {m}', knob("substitute", variant="cumulative", mass=m))
        for m in (0.5,)
    ),
    _route_ahead(1),
    _route_ahead(2),
    *(
        _routing(
            f"budget = {b}: substitute and drop-cold",
            knob("substitute", weight=1.0),
            knob("drop-cold", share=1.0),
            budget=b,
            plugin="loss",
        )
        for b in (0.01, 0.02, 0.05, 0.1)
    ),
)
PROMPTS = (
    *(_prompt(f"experts = {n}", knob("moe-spec", experts=n, scope="prefill")) for n in (8, 16, 24)),
    *(_prompt(f"k = {k}, in the prompt", knob("top-k", k=k, scope="prefill")) for k in (2, 3)),
    _prompt('importance = "uniform", all trivial', knob("edgexpert-prefill", importance="uniform", high=2.0, low=2.0)),
    *(_prompt(f'importance = "{name}"', knob("edgexpert-prefill", importance=name)) for name in SCORERS),
)
CASES: tuple[Case, ...] = (*CACHES, *PREFETCHERS, *ROUTING, *PROMPTS)
BASE = CACHES[0]
"""What bytes and speed are compared with."""
