"""Without a cache, one set of slots serves every layer."""

from __future__ import annotations

from bmoe.native import memory
from bmoe.native.evalhook import PythonSeam
from bmoe.native.memory import PAGE
from bmoe.slots import SharedSlots

from .world import LINUX, SHAPES, Build

pytestmark = LINUX


def test_shared_slots_hold_the_routing_in_flight_for_any_layer_and_never_more_memory(build: Build) -> None:
    shape = SHAPES["mixed strides and projections"]
    world = build(shape, 0)
    seam = PythonSeam(world.banks)
    slots = SharedSlots(world.banks, seam)
    try:
        for turn in range(6):
            for bank, facts in enumerate(world.banks):
                experts = [turn % facts.n_expert, (turn + 2) % facts.n_expert]
                reads = slots.stage(bank, [seam.key_base[bank] + expert for expert in experts])
                assert reads is not None
                world.read(reads)
                slots.commit(bank)
                for address, projection in zip(slots.addresses[bank], facts.projections, strict=True):
                    for expert in experts:
                        first = projection.offset + expert * projection.stride
                        there = memory.view(address + expert * projection.stride, projection.stride)
                        assert world.content[first : first + projection.stride] == bytes(there)
            slots.settle()
        assert (36, 0, 0) == (slots.counters.lookups, slots.counters.hits, slots.held_bytes)
        assert b"" == bytes(seam.resident).strip(b"\0")
        widest = [
            max(b.projections[p].stride * b.n_expert for b in world.banks if p < len(b.projections)) for p in range(3)
        ]
        assert sum(widest) <= slots.slot_bytes <= sum(widest) + 6 * PAGE
    finally:
        slots.close()
