"""What a run holds in memory at most, against what it says that it needs. Measured in a process that does nothing else.

The sum is what a person who sizes a machine would add up: what the process holds after importing all that an open
imports, the weights outside the experts, the cache's budget (or the slots), and the buffers of one conversation as
llama.cpp names them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import bmoe
from bmoe.native import lib, llamalog
from bmoe.plugins import load_all
from bmoe.process import ProcessCounters
from bmoe.registry import load_registry


def measure(
    model: str, profile: Mapping[str, Any], overrides: Sequence[str], prompt: Sequence[int], tokens: Sequence[int]
) -> dict[str, Any]:
    """Feed ``prompt`` and then ``tokens`` one by one; peaks and parts in bytes, ``ratio`` = peak / sum of parts.

    ``mapped`` is what of the resident memory are pages of files afterwards, which the system may take back at any time.
    Peaks are None where the kernel does not let a process forget them.
    """
    lib.llama()
    llamalog.start()
    load_all(load_registry())
    importlib.import_module("gguf.constants")
    importlib.import_module("bmoe.conversation")
    counters = ProcessCounters()
    base = counters.sample()
    with bmoe.open(profile, model, overrides) as engine, engine.conversation() as conversation:
        stream = engine.stream
        assert stream is not None, "nothing is streamed"
        widest = 0
        parts = {
            "baseline": base.rss_bytes or 0,
            "dense": engine.facts.dense_bytes,
            "experts": stream.store.budget_bytes or stream.store.slot_bytes,
            **{f"context_{kind}": nbytes for kind, nbytes in sorted(engine.buffers.items())},
        }
        peaks: dict[str, int | None] = {}
        for phase, batches in (("prefill", [list(prompt)]), ("decode", [[token] for token in tokens])):
            counters.forget_peak()
            for batch in batches:
                conversation.feed(batch)
                widest = max(widest, stream.store.held_bytes)
            peaks[phase] = counters.peak_rss_bytes()
        after = counters.sample()
        opened = engine.open_peak_rss_bytes
    counters.close()
    total = sum(parts.values())
    return {
        "parts": parts,
        "sum_bytes": total,
        "peaks": peaks,
        "ratio": {phase: peak / total if peak is not None else None for phase, peak in peaks.items()},
        "open_peak_bytes": opened,
        "held_bytes": widest,
        "resident": {
            "anon": after.rss_anon_bytes,
            "mapped": after.rss_file_bytes,
            "mapped_before": base.rss_file_bytes,
            "shared": after.rss_shmem_bytes,
        },
    }
