"""Under a limit that the budget and the mapped weights exceed together, the watch sees it and gives experts up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from bmoe.synth import SHAPES
from bmoe.testing.limits import memory_limit
from bmoe.testing.models import TinyModels

MIB = 1 << 20


@pytest.fixture(name="wide", scope="module")
def _wide(tmp_path_factory):
    """An output head of 96 MiB, which every token reads, and 288 MiB of experts."""
    shape = replace(SHAPES["tiny-qwen3moe"], name="head", n_expert=48, n_ff_exp=512, n_vocab=98304)
    return str(TinyModels(tmp_path_factory.mktemp("models")).path(shape, "F32", layers=4))


def uncached(path):
    """Pages that are in the page cache already would be charged to whoever brought them there."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@pytest.mark.parametrize("watch", ["warn", "shrink"])
def test_real_pressure_is_told_and_shrinks_only_if_it_may(wide, watch):
    program = f"""
import json
import bmoe
overrides = ["cache.budget_mb=200", "model.threads=1", "model.ctx=4096", "model.ubatch=4", 'cache.watch="{watch}"']
with bmoe.open({{}}, {wide!r}, overrides) as engine, engine.conversation() as conversation:
    budgets = [engine.stream.store.budget_bytes]
    faults = 0
    for token in conversation.generate([5, 300, 301, 7], 1200):
        faults += token.record.majflt
        now = engine.stream.store.budget_bytes
        if now != budgets[-1]:
            budgets.append(now)
        if len(budgets) == 3 or ({watch!r} == "warn" and engine.cache_size.watch._judge._told_at is not None):
            break
    print(json.dumps([budgets, faults, token.record.index, engine.plan.budget.cycle_bytes]))
"""
    uncached(wide)
    with memory_limit(310 * MIB) as limit:
        if limit is None:
            pytest.skip("nobody may limit memory here: no control group that can be made, no systemd")
        command = limit.command([sys.executable, "-c", program])
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    *told, last = done.stdout.splitlines()
    budgets, faults, tokens, cycle = json.loads(last)

    assert faults > 20, (faults, tokens)
    assert "memory is short" in "".join(told) + done.stderr
    assert budgets == sorted(budgets, reverse=True)
    assert len(budgets) == (3 if watch == "shrink" else 1)
    assert budgets[-1] >= cycle
