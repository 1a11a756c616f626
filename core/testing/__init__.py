"""What plugins are tested with: gate classes to subclass, tiny models, seeded routing traces.

``from bmoe.testing import CachePolicyGates`` needs pytest and hypothesis, which ``bmoe[dev]`` brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bmoe.testing.archs import ArchGates
    from bmoe.testing.caches import CachePolicyGates
    from bmoe.testing.dense import DenseGates
    from bmoe.testing.drafters import DraftGates
    from bmoe.testing.fetch import FetchGates
    from bmoe.testing.importance import ImportanceGates
    from bmoe.testing.prefetch import PrefetchGates
    from bmoe.testing.routing import RoutingGates
    from bmoe.testing.sinks import SinkGates

__all__ = [
    "ArchGates",
    "CachePolicyGates",
    "DenseGates",
    "DraftGates",
    "FetchGates",
    "ImportanceGates",
    "PrefetchGates",
    "RoutingGates",
    "SinkGates",
]

_HOMES = {
    "ArchGates": "bmoe.testing.archs",
    "CachePolicyGates": "bmoe.testing.caches",
    "DenseGates": "bmoe.testing.dense",
    "DraftGates": "bmoe.testing.drafters",
    "FetchGates": "bmoe.testing.fetch",
    "ImportanceGates": "bmoe.testing.importance",
    "PrefetchGates": "bmoe.testing.prefetch",
    "RoutingGates": "bmoe.testing.routing",
    "SinkGates": "bmoe.testing.sinks",
}


def __getattr__(name: str) -> Any:
    """Import a gate class when it is asked for, so that the traces and models need no test library."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
