"""Runs Mixture-of-Experts models that are bigger than memory: reads only the routed experts from flash.

For programs: :func:`open`, which gives an :class:`Engine` with conversations on it, ``load_profile`` and the errors.
For plugins: ``hookimpl``, ``Provider`` and the rest of :mod:`bmoe.contracts`.
"""

from __future__ import annotations

if __name__ != "bmoe":
    # `import core` from the repository's root would make a second copy of every module under another name.
    raise ImportError(f"import this package as bmoe, not as {__name__}; install it with `pip install -e .`")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bmoe.contracts import (
    ArchRow,
    BankFacts,
    BatchContext,
    CacheFacts,
    CachePolicy,
    DensePlacement,
    DenseTensor,
    Drafter,
    ExpertKey,
    Facts,
    Fetcher,
    FetchFacts,
    Importance,
    KeyParts,
    ModelFacts,
    Observer,
    Options,
    Placement,
    Prefetcher,
    ProjectionFacts,
    Proposal,
    Provider,
    Read,
    ReadBatch,
    Routing,
    RoutingEvent,
    RoutingPolicy,
    RunRecord,
    RunSummary,
    ShardFacts,
    Sink,
    TensorFacts,
    Ticket,
    TokenRecord,
    expert_key,
    key_parts,
)
from bmoe.errors import BmoeError, LogitsError, ModelError, NativeError, PluginError, ProfileError, ReadError
from bmoe.hookspecs import hookimpl
from bmoe.profile import Profile, load_profile

__all__ = [
    "ArchRow",
    "BankFacts",
    "BatchContext",
    "BmoeError",
    "CacheFacts",
    "CachePolicy",
    "Conversation",
    "DensePlacement",
    "DenseTensor",
    "Drafter",
    "Engine",
    "ExpertKey",
    "Facts",
    "FetchFacts",
    "Fetcher",
    "Importance",
    "KeyParts",
    "LogitsError",
    "ModelError",
    "ModelFacts",
    "NativeError",
    "Observer",
    "Options",
    "Placement",
    "PluginError",
    "Prefetcher",
    "Profile",
    "ProfileError",
    "ProjectionFacts",
    "Proposal",
    "Provider",
    "Read",
    "ReadBatch",
    "ReadError",
    "Routing",
    "RoutingEvent",
    "RoutingPolicy",
    "RunRecord",
    "RunSummary",
    "ShardFacts",
    "Sink",
    "TensorFacts",
    "Ticket",
    "Token",
    "TokenRecord",
    "expert_key",
    "hookimpl",
    "key_parts",
    "load_profile",
    "open",
]

if TYPE_CHECKING:
    from bmoe.conversation import Conversation, Token
    from bmoe.engine import Engine
    from bmoe.engine import open_engine as open

_LAZY = {
    "Conversation": ("bmoe.conversation", "Conversation"),
    "Engine": ("bmoe.engine", "Engine"),
    "Token": ("bmoe.conversation", "Token"),
    "open": ("bmoe.engine", "open_engine"),
}


def __getattr__(name: str) -> Any:
    """The names that need llama.cpp and numpy are loaded when they are first used; policies never need them."""
    if name not in _LAZY:
        raise AttributeError(f"module 'bmoe' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)
