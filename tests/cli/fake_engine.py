"""The command line with a made-up engine, so that its ends can be tried as real processes without a model.

``--model`` chooses what it does: ``ok`` generates until asked to stop, ``fails`` with a read error, ``bug`` with a
defect, ``stuck`` is inside C, where no Python handler runs, until cancelled; ``slow`` waits between tokens.
Example: ``python fake_engine.py --profile demo --model ok -p hi -n 3``
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import threading
import types
from typing import NamedTuple

from bmoe.contracts import RunRecord, RunSummary, TokenRecord
from bmoe.errors import ReadError
from bmoe.profile import load_profile


class Token(NamedTuple):
    id: int
    text: str
    record: TokenRecord


SUMMARY = RunSummary(
    tokens=0, prompt_tokens=2, tok_s=None, open_s=0.5, prefill_s=0.5, decode_s=0.5, hit_rate=0.75, lookups=96, hits=72,
    evictions=8, rereads=4, bytes_read=24 << 20, prefill_bytes=48 << 20, bytes_per_token=12.0 * 2**20, io_wait_s=0.125,
    manage_s=0.0625, cpu_s=0.5, open_read_bytes=None, open_peak_rss_bytes=None, peak_rss_bytes=100 << 20,
    dense_bytes=1 << 20, slot_bytes=0, cache_budget_bytes=64 << 20, cache_held_bytes=32 << 20, direct_io=True,
    seam="python", lossy=False, stop="length",
)  # fmt: skip


class Conversation:
    def __init__(self, behaviour):
        self.behaviour = behaviour
        self.summary = None
        self._cancelled = threading.Event()
        self._libc = ctypes.CDLL(None)
        self._mutex = ctypes.create_string_buffer(64)  # all zeros: an unlocked mutex
        self._libc.pthread_mutex_lock(self._mutex)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def cancel(self):
        self._cancelled.set()
        self._libc.pthread_mutex_unlock(self._mutex)

    def generate(self, prompt, max_tokens, *, hash_logits=False):
        return self._generate(prompt, max_tokens, "ab" * 32 if hash_logits else None)

    def _generate(self, prompt, max_tokens, digest):
        done, stop = 0, "error"
        try:
            for index in range(max_tokens):
                text = prompt[index % len(prompt)]
                done += 1
                yield Token(index, text, TokenRecord(index, index, text, decode_s=0.25))
                self._between(done)
                if self._cancelled.is_set():
                    break
            stop = "cancelled" if self._cancelled.is_set() else "length"
        finally:
            self.summary = dataclasses.replace(SUMMARY, tokens=done, stop=stop, logits_sha256=digest)

    def _between(self, done):
        if self.behaviour == "fails" and done == 3:
            raise ReadError("m.gguf: read of 4096 bytes at 8192 failed: Input/output error (5)")
        if self.behaviour == "bug" and done == 3:
            raise ZeroDivisionError("a defect")
        if self.behaviour == "slow" and done == 2:
            self._cancelled.wait()
        if self.behaviour == "stuck" and done == 2:
            self._libc.pthread_mutex_lock(self._mutex)  # returns when cancel() unlocks it, from another thread


class Engine:
    def __init__(self, profile, model=None, overrides=(), remember=None):
        loaded = load_profile(profile, overrides=overrides)
        self.model = model
        dump = loaded.model_dump(mode="json")
        self.record = RunRecord("r", str(model), "made-up", {}, {}, dump, {}, notices=("the budget became 64 MiB",))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def conversation(self):
        return Conversation(self.model)


if __name__ == "__main__":
    module = types.ModuleType("bmoe.engine")
    module.open_engine = Engine
    sys.modules["bmoe.engine"] = module
    from bmoe.cli import main

    sys.exit(main())
