"""Trials that no machine measured, for tests of what is concluded from trials."""

from __future__ import annotations

from bmoe.bench.entry import EntryState
from bmoe.bench.trial import Trial

ENTRY = EntryState(load_1min=0.5, available_bytes=8 << 30, temperature_c=50.0, cpu_mhz=2000.0)


def trial(side, index, seconds=(0.1, 0.2), **fields):
    """A trial of two measured tokens that look three experts up each, of which one is in memory."""
    count = len(seconds)
    values = {
        "round": index, "side": side, "prompt": index % 4, "entry": ENTRY, "prompt_tokens": 5, "given": True,
        "tokens": [1, 2], "choices": [1, 2], "logits_sha256": "same", "open_s": 1.0, "prefill_s": 0.5,
        "peak_rss_bytes": 1 << 20, "warmup_s": [9.0], "decode_s": list(seconds), "read_wait_s": [0.05] * count,
        "manage_s": [0.0] * count, "hits": [1] * count, "lookups": [3] * count, "bytes": [2 << 20] * count,
        "evictions": [2] * count, "majflt": [0] * count, "run": run(),
    }  # fmt: skip
    return Trial(**{**values, **fields})


def run(**fields):
    """As much of a run record as is looked at."""
    record = {
        "model": "/m.gguf", "arch": "glm4moe", "lossy": False, "machine": {"cpus": 2},
        "resolved": {"cache": {"used": True}},
    }  # fmt: skip
    return {**record, **fields}
