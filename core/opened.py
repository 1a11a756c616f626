"""What opening a model came to, for the run record: what was granted, what it took, what is not as it was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bmoe.contracts import Repacking
from bmoe.problems import toml_value

if TYPE_CHECKING:
    from bmoe.engine import Engine


def notices(engine: Engine) -> tuple[str, ...]:
    """What a person should know about this open, one sentence each."""
    fetcher, plan = engine.hot.fetcher, engine.plan
    said = list(engine.placement.notices if engine.placement else ())
    if plan.streaming and plan.direct and not fetcher.direct:
        said.append(f"reads go through the page cache: {fetcher.note}")
    if isinstance(engine.hot.dense, Repacking) and not engine.repacked:
        asked = f"dense.placement = {toml_value(plan.dense.name)}"
        said.append(f"{asked} rearranges nothing: no weight of this model that this processor has a kernel for")
    return tuple(said)


def resolved(engine: Engine) -> dict[str, Any]:
    """What a run record says beyond the plan."""
    report = engine.model.report
    facts: dict[str, Any] = {
        "seam": engine.seam.name if engine.stream is not None else None,
        "open_s": engine.open_s,
        "open_read_bytes": report.read_bytes,
        "open_peak_rss_bytes": engine.open_peak_rss_bytes,
        "context_bytes": dict(engine.buffers) or None,
        "dense": _dense(engine),
        "cache": {**engine.plan.resolved()["cache"], "preloaded_bytes": preloaded_bytes(engine)},
    }
    if engine.stream is None:
        return {**facts, "direct_io": None}
    return {**facts, "direct_io": engine.stream.fetcher.direct, "slot_bytes": engine.stream.store.slot_bytes}


def preloaded_bytes(engine: Engine) -> int:
    """Bytes of experts that were read at open because earlier runs used them."""
    return engine.warmth.preloaded_bytes if engine.warmth is not None else 0


def _dense(engine: Engine) -> dict[str, Any]:
    placement = engine.placement
    return {
        **engine.plan.resolved()["dense"],
        "placed_bytes": placement.placed_bytes if placement else None,
        "resident_bytes": placement.resident_bytes if placement else None,
        "released_bytes": engine.released_bytes if placement else None,
        "repacked_bytes": sum(t.nbytes for t in engine.facts.dense if t.name in engine.repacked),
    }
