"""The architectures of registry.toml, a table of rows: which tensors of a model file hold routed experts."""

from __future__ import annotations

from collections.abc import Sequence

from bmoe import hookimpl
from bmoe.contracts import ArchRow
from bmoe.registry import load_registry


@hookimpl
def bmoe_archs() -> Sequence[ArchRow]:
    """Return every row of the table."""
    return load_registry().archs
