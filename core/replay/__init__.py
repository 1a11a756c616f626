"""Offline replay: a routing trace against a cache policy, and the most hits that any policy could have had."""

from __future__ import annotations

from bmoe.replay.belady import most_hits
from bmoe.replay.offline import Replayed, Step, Trace, batches, cycle, entries, replay

__all__ = ["Replayed", "Step", "Trace", "batches", "cycle", "entries", "most_hits", "replay"]
