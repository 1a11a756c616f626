"""After a failing policy or read the books are right, nothing half-read is valid and the store goes on."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from bmoe.contracts import ExpertKey
from bmoe.errors import PluginError
from bmoe.native.memory import PAGE

from .world import LINUX, SHAPES, Build, Reference, pass_through, whole

pytestmark = LINUX


@pytest.mark.parametrize("named", [lambda keys: keys[0], lambda keys: keys[0] | 0xFFFF, lambda keys: 77 << 24])
def test_a_policy_that_names_a_wrong_victim_is_told_so_and_nothing_is_lost_for_good(
    build: Build, monkeypatch: pytest.MonkeyPatch, named: Callable[[list[ExpertKey]], ExpertKey]
) -> None:
    world = build(SHAPES["nine pages at any offset"], 70 * PAGE)
    world.route(0, [0, 1])
    keys = world.keys(1, [2, 3])
    world.store._victim = lambda pinned: named(keys)

    with pytest.raises(PluginError, match="the cache policy named .* as victim, which is not resident or is pinned"):
        world.store.stage(1, keys)

    assert (0, set(), b"") == (world.store.held_bytes, world.present(), bytes(world.seam.resident).strip(b"\0"))
    world.store._victim = world.policy.victim
    world.reference.resident.clear()
    world.reference.lookups, world.reference.admissions = world.store.counters.lookups, world.store.counters.admissions
    world.route(1, [2, 3])
    world.settle()
    world.check()


@pytest.mark.parametrize("call", ["touch", "admit", "victim", "forget"])
@pytest.mark.parametrize("error", [RuntimeError("a plugin"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_after_a_failing_policy_call_the_books_are_right_again(build: Build, call: str, error: BaseException) -> None:
    world = build(SHAPES["a little more than a page"], 24 * PAGE)
    for turn in range(4):
        world.route(turn % 3, [turn, turn + 1, turn + 2])
    attribute = {"touch": "_touch", "admit": "_admitted", "victim": "_victim", "forget": "_forget"}[call]
    real, calls = getattr(world.store, attribute), []

    def fail_once(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == (1 if call == "touch" else 2):
            raise error
        return real(*arguments)

    setattr(world.store, attribute, fail_once)
    with pytest.raises(type(error)) as caught:
        world.store.stage(0, world.keys(0, [5, 7, 9, 10, 11]))
    assert error is caught.value
    setattr(world.store, attribute, real)

    counters = world.store.counters
    resident = {
        world.seam.key_base[bank] + expert
        for bank, facts in enumerate(world.banks)
        for expert in range(facts.n_expert)
        if world.seam.resident[world.seam.entry_base[bank] + expert]
    }
    assert resident == set(world.policy._order)
    world.reference = Reference(
        resident, set(world.store._evicted), counters.lookups, counters.hits, counters.admissions, counters.evictions
    )
    world.reference.rereads = counters.rereads
    world.check()
    dice = random.Random(3)
    for _ in range(10):
        pass_through(world, dice)


def test_after_abandon_nothing_of_the_routing_is_valid_and_its_neighbours_are_whole(build: Build) -> None:
    world = build(SHAPES["several experts in a page"], whole(SHAPES["several experts in a page"]))
    world.route(0, [0, 2, 4])
    world.route(0, [1, 2, 3], fails=True)

    assert set(world.keys(0, [0, 2, 4])) == world.reference.resident
    world.check()
    world.route(0, [1, 3])
    world.check()


def test_abandon_without_a_stage_changes_nothing(build: Build) -> None:
    world = build(SHAPES["whole aligned pages"], 20 * PAGE)
    world.route(0, [0])
    world.store.abandon()
    world.store.commit(0)
    world.check()
