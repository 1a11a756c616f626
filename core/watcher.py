"""What sees a stream and changes nothing of it, such as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bmoe.contracts import BatchContext, ExpertKey


class Watcher(Protocol):
    """Sees what a stream does and changes nothing, such as a trace; called on the thread that decodes.

    While there is one, every routing is handled in Python, hit or not. What it raises fails the decode.
    """

    def begin(self, batch: BatchContext, /) -> None:
        """A decode of these tokens begins."""

    def routing(self, bank: int, keys: Sequence[ExpertKey], /) -> None:
        """A layer was routed, and nothing of it is ranked, read or evicted yet; the seam's node is its routing."""

    def handled(self, bank: int, /) -> None:
        """What had to be awaited for it has arrived; it is computed next."""

    def end(self, complete: bool, /) -> None:
        """The decode ended; if it is not complete, nothing of it is in the KV."""

    def accepted(self, kept: Sequence[int], /) -> None:
        """Of the verify batch that ended last, the tokens at these places are a part of the text, and no others."""
