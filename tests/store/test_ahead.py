"""Whole banks that are read before they are routed, and what a prompt leaves behind."""

from __future__ import annotations

import random

import pytest

from bmoe.native import memory
from bmoe.native.evalhook import PythonSeam
from bmoe.native.memory import PAGE
from bmoe.pages import by_stage
from bmoe.slots import SharedSlots

from .world import LINUX, SHAPES, Build, Shape, whole

pytestmark = LINUX
NINE = SHAPES["nine pages at any offset"]


def bank_bytes(shape: Shape) -> int:
    return whole(shape) // len(shape.layers)


def test_what_is_missing_of_the_next_bank_is_read_in_few_long_reads_and_not_again(build: Build) -> None:
    world = build(NINE, whole(NINE) - PAGE)
    world.route(1, [2, 5])
    keys = world.keys(1, range(8))
    world.store.stage(0, world.keys(0, range(8)))
    world.store.commit(0)

    batch = world.store.ahead(1)

    assert batch is not None
    assert 9 == len(batch), "three runs of experts in each of three projections"
    assert [0, 0, 0, 1, 1, 1, 2, 2, 2] == batch.stage.tolist()
    assert 0 == sum(world.seam.resident[world.seam.entry_base[1] + e] for e in (0, 1, 3, 4, 6, 7))
    for part in by_stage(batch):
        world.read(part)
    assert world.store.stage(1, keys) is None
    world.store.commit(1)
    world.reference.resident.update(keys)
    for expert in range(8):
        for address, offset, nbytes in world.spans(1, expert):
            assert world.content[offset : offset + nbytes] == bytes(memory.view(address, nbytes))


def test_a_bank_that_does_not_fit_beside_the_one_before_is_not_read_ahead(build: Build) -> None:
    world = build(NINE, 2 * bank_bytes(NINE) - PAGE)
    world.route(0, range(8))

    assert world.store.ahead(1) is None
    assert world.store.ahead(0) is None, "there is none before it"
    world.settle()
    world.check()


def test_reading_ahead_never_evicts_what_the_routing_before_it_uses(build: Build) -> None:
    world = build(NINE, 2 * bank_bytes(NINE) + 4 * PAGE)
    for bank in (0, 1, 2):
        world.store.stage(bank, world.keys(bank, range(8)))
        world.store.commit(bank)
        if bank < 2:
            assert world.store.ahead(bank + 1) is not None
        resident = {
            key for key in world.keys(bank, range(8)) if world.seam.resident[world.seam.entry_base[bank] + key % 8]
        }
        assert set(world.keys(bank, range(8))) == resident
        assert world.store.held_bytes <= world.budget + 4 * PAGE


def test_entries_that_were_given_up_are_read_again(build: Build) -> None:
    world = build(NINE, whole(NINE) - PAGE)
    world.store.stage(0, world.keys(0, [0]))
    world.store.commit(0)
    world.store.ahead(1)

    world.store.abandon()

    batch = world.store.stage(1, world.keys(1, [3]))
    assert batch is not None
    assert 3 == len(batch)
    world.store.abandon()
    world.store.settle()
    idle = len(world.store.frames._idle_edges)
    assert world.store.held_bytes <= (3 * 11 + idle) * PAGE, "the entry that is left, and edges"


def test_a_prompt_leaves_what_its_last_tokens_used(build: Build) -> None:
    shape = Shape(((16, (36864,) * 3),) * 6)
    world = build(shape, int(whole(shape) * 0.6))
    for bank in range(6):
        order = random.Random(bank).sample(range(16), 16)
        world.route(bank, order)
        world.store.retire(bank, world.keys(bank, order))
        latest = world.keys(bank, order[-3:])
        assert set(latest) <= world.reference.resident
    kept = [
        sum(key in world.reference.resident for key in world.keys(bank, random.Random(bank).sample(range(16), 16)[-3:]))
        for bank in range(6)
    ]

    assert [3] * 6 == kept, "every layer keeps what the last tokens used, the first as well as the last"


def test_what_was_read_ahead_and_not_used_goes_first(build: Build) -> None:
    world = build(NINE, 2 * bank_bytes(NINE))
    world.store.stage(0, world.keys(0, [0]))
    world.store.commit(0)
    world.store.ahead(1)
    world.store.stage(1, world.keys(1, [6, 7]))
    world.store.commit(1)
    world.store.retire(1, world.keys(1, [6, 7]))

    world.store.stage(2, world.keys(2, range(8)))

    resident, base = world.seam.resident, world.seam.entry_base
    assert world.store.counters.evictions > 0
    assert resident[base[0]], "older, and of use"
    assert [1, 1] == [resident[base[1] + e] for e in (6, 7)]


def test_what_a_prompt_left_is_not_given_up_first_once_it_is_used_again(build: Build) -> None:
    world = build(NINE, whole(NINE) - PAGE)
    world.route(0, range(8))
    world.store.retire(0, world.keys(0, range(8)))
    world.route(0, [1])
    world.route(1, range(8))
    world.route(2, range(8))

    assert world.keys(0, [1])[0] in world.reference.resident
    assert world.keys(0, [0])[0] not in world.reference.resident


@pytest.mark.parametrize("name", SHAPES)
def test_slots_take_the_next_bank_one_projection_at_a_time(build: Build, name: str) -> None:
    world = build(SHAPES[name], 0)
    slots = SharedSlots(world.banks, PythonSeam(world.banks))
    try:
        for bank, facts in enumerate(world.banks):
            batch = slots.ahead(bank)
            assert batch is not None
            assert len(facts.projections) == len(batch), "one read a projection"
            for part in by_stage(batch):
                world.read(part)
                stage = int(part.stage[0])
                first, address = facts.projections[stage], slots.addresses[bank][stage]
                size = first.stride * facts.n_expert
                assert world.content[first.offset : first.offset + size] == bytes(memory.view(address, size))
            assert slots.stage(bank, world.keys(bank, [0])) is None
            slots.commit(bank)
            assert slots.stage(bank, world.keys(bank, [0])) is not None
    finally:
        slots.close()
