"""A model with more slices than a process may have mappings: the store stops moving pages in time, and never fails."""

from __future__ import annotations

import json
import subprocess
import sys

from bmoe.machine import read_machine

from .world import LINUX

pytestmark = LINUX

PROGRAM = """
import json
from bmoe.contracts import BankFacts, ProjectionFacts
from bmoe.machine import read_machine
from bmoe.native import memory
from bmoe.native.evalhook import PythonSeam
from bmoe.native.memory import PAGE
from bmoe.store import ExpertStore
from bmoe_plugins.caches.lru import Lru

LAYERS, EXPERTS, STRIDE = 61, 256, 2 * PAGE  # whole pages, so that every eviction gives some away
banks, at = [], PAGE
for layer in range(LAYERS):
    rows = []
    for n in range(3):
        rows.append(ProjectionFacts(f"blk.{layer}.p{n}", f"p{n}", 0, at, STRIDE, "F32"))
        at += STRIDE * EXPERTS
    banks.append(BankFacts(layer, 0, EXPERTS, 8, tuple(rows)))
limit = TOLD
# others in the process have mappings too: every second page of these is one of its own
others = memory.reserve(max(2, 2 * TAKEN) * PAGE)
for page in range(TAKEN):
    memory.forbid(others.address + 2 * page * PAGE, PAGE)
seam = PythonSeam(banks)
store = ExpertStore(banks, seam, Lru(), 1200 * 6 * PAGE, limit)
most = 0
for turn in range(EXPERTS // 8):
    for bank, base in enumerate(seam.key_base):
        experts = [(turn * 8 + i * 37) % EXPERTS for i in range(8)]
        batch = store.stage(bank, [base + expert for expert in experts])
        if batch is not None:
            for index in range(len(batch)):
                row = batch.row(index)
                memory.fill(row.address, bank ^ row.stage ^ 0x5A, row.length)
            store.commit(bank)
        for address in store.addresses[bank]:
            for expert in experts:
                view = memory.view(address + expert * STRIDE, STRIDE)
                assert view[PAGE] == view[PAGE + 7]
    store.settle()
    most = max(most, memory.count_mappings())
counters = store.counters
print(json.dumps([most, limit, counters.evictions, store.frames.recycled, len(store.frames._moved)]))
store.close()
"""


def drive(told: str, taken: int) -> list[int]:
    """In a process of its own, since what it takes is everybody's there."""
    source = PROGRAM.replace("TOLD", told).replace("TAKEN", str(taken))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    found: list[int] = json.loads(done.stdout)
    return found


def test_61_layers_of_256_experts_stay_below_the_limit_of_mappings() -> None:
    most, limit, evictions, recycled, moved = drive("read_machine().max_map_count or 65530", 0)

    assert evictions > 10_000
    assert 61 * 256 * 3 > moved > 0, "every slice was moved, so that the limit was not tried"
    assert recycled > 0
    assert most < limit


def test_a_limit_that_nobody_told_of_is_met_and_survived() -> None:
    """The kernel refuses the mapping; the pages are given back and taken anew."""
    allowed = read_machine().max_map_count or 65530
    most, _, evictions, recycled, moved = drive("None", max(1, allowed // 2 - 8000))

    assert evictions > 10_000
    assert 0 < recycled < moved, "every page was moved, so that the limit was not met"
    assert allowed - 100 < most <= allowed
