"""What a seam takes in turns: a layer's second bank after its first, and a product whose successor is still read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.contracts import BankFacts, ProjectionFacts, expert_key
from bmoe.errors import NativeError
from bmoe.native.compiled import CSeam
from bmoe.native.evalhook import PythonSeam, Seam

from .nodes import COMPILED, SEAMS, Driven, Node

WEIGHT = 0x1000


def two_banks(layers: int) -> list[BankFacts]:
    """Layers with eight experts and a second bank of four."""
    return [
        BankFacts(layer, bank, 8 >> bank, 2, (ProjectionFacts(f"w{layer}.{bank}", "w", 0, 0, 64, "F32"),))
        for layer in range(layers)
        for bank in range(2)
    ]


def product(weight: int = WEIGHT, name: bytes = b"ffn_moe_gate-0") -> Node:
    """A node that multiplies by the weight at this address."""
    return Node(name, [[0]], weight=weight)


# ---- two banks in a layer


@pytest.mark.parametrize("form", SEAMS)
def test_the_cast_of_a_choice_routes_the_second_bank(form: type[Seam]) -> None:
    driven = Driven(form, two_banks(2))
    driven.seam.begin()
    for layer in range(2):
        assert driven.asked_and_computed(Node(b"ffn_moe_topk-%d" % layer, [[6, 1]]))
        assert not driven.ask(Node(b"ffn_moe_topk-%d" % layer, [[6, 1]])), "the same choice again"
        assert not driven.ask(Node(b"ffn_moe_topk-%d (copy)" % layer, [[6, 1]])), "its cast to float"
        assert driven.asked_and_computed(Node(b" (copy)", [[3, 0]]))
        assert not driven.ask(Node(b" (copy)", [[3, 0]])), "another cast"

    keys = [[expert_key(layer, e, bank) for e in ids] for layer in range(2) for bank, ids in ((0, (6, 1)), (1, (3, 0)))]
    assert list(enumerate(keys)) == driven.calls


@pytest.mark.parametrize("form", SEAMS)
def test_a_decode_that_ended_between_two_banks_leaves_nothing_behind(form: type[Seam]) -> None:
    driven = Driven(form, two_banks(1))
    driven.seam.begin()
    assert driven.asked_and_computed(Node(b"ffn_moe_topk-0", [[6, 1]]))
    driven.seam.finish()
    driven.seam.begin()

    assert not driven.ask(Node(b" (copy)", [[3, 0]]))
    assert driven.asked_and_computed(Node(b"ffn_moe_topk-0", [[2, 1]]))


@pytest.mark.parametrize("form", SEAMS)
def test_without_a_second_bank_a_cast_is_no_routing(form: type[Seam]) -> None:
    driven = Driven(form, two_banks(1)[:1])
    driven.seam.begin()
    assert driven.asked_and_computed(Node(b"ffn_moe_topk-0", [[6, 1]]))

    assert not driven.ask(Node(b" (copy)", [[3, 0]]))
    assert driven.asked_and_computed(Node(b"ffn_moe_topk-0", [[6, 1]])), "with one bank it is another routing"


# ---- a product that is awaited


@pytest.mark.parametrize("form", SEAMS)
def test_the_awaited_product_is_isolated_once_and_announced_after_it_was_computed(form: type[Seam]) -> None:
    driven = Driven(form, two_banks(1))
    turns: list[str] = []
    driven.seam.advance = lambda: turns.append("advance")
    driven.seam.begin()
    assert not driven.ask(product())
    driven.seam.isolate(WEIGHT)

    assert not driven.ask(product(WEIGHT + 8))
    assert driven.ask(product())
    assert [] == turns
    assert driven.computed(product())
    assert ["advance"] == turns
    assert not driven.ask(product())


@pytest.mark.parametrize("form", SEAMS)
def test_the_next_product_can_be_awaited_from_within(form: type[Seam]) -> None:
    driven = Driven(form, two_banks(1))
    turns: list[int] = []

    def advance() -> None:
        turns.append(len(turns))
        if len(turns) < 3:
            driven.seam.isolate(WEIGHT + 8 * len(turns))

    driven.seam.advance = advance
    driven.seam.begin()
    driven.seam.isolate(WEIGHT)
    for index in range(4):
        assert (index < 3) == driven.ask(product(WEIGHT + 8 * index))
        if index < 3:
            assert driven.computed(product(WEIGHT + 8 * index))

    assert [0, 1, 2] == turns


@pytest.mark.parametrize("form", SEAMS)
def test_what_is_raised_there_ends_the_decode_and_surfaces_as_itself(form: type[Seam]) -> None:
    driven = Driven(form, two_banks(1))
    error = OSError("the drive is gone")

    def advance() -> None:
        raise error

    driven.seam.advance = advance
    driven.seam.begin()
    driven.seam.isolate(WEIGHT)

    assert driven.ask(product())
    assert not driven.computed(product())
    assert driven.aborts
    with pytest.raises(OSError, match="the drive is gone") as caught:
        driven.seam.finish()
    assert caught.value is error
    driven.seam.begin()
    assert not driven.ask(product()), "forgotten by the next decode"


@pytest.mark.parametrize("form", SEAMS)
def test_nothing_is_awaited_after_it_was_taken_back_or_in_another_decode(form: type[Seam]) -> None:
    driven = Driven(form, two_banks(1))
    driven.seam.begin()
    driven.seam.isolate(WEIGHT)
    driven.seam.isolate(0)
    assert not driven.ask(product())
    driven.seam.isolate(WEIGHT)
    driven.seam.begin()
    assert not driven.ask(product())
    driven.seam.isolate(WEIGHT)
    assert driven.ask(product())
    assert not driven.computed(product()), "nobody handles it"
    with pytest.raises(NativeError, match="nobody handles"):
        driven.seam.finish()


# ---- held equal


@COMPILED
@given(
    st.lists(
        st.sampled_from([b"ffn_moe_topk-0", b"ffn_moe_topk-1", b" (copy)", b" (copy) (view)", b"ffn_moe_gate-0"])
        | st.sampled_from([0, WEIGHT, WEIGHT + 8]),
        max_size=24,
    )
)
def test_both_forms_take_turns_alike(steps: list[bytes | int]) -> None:
    def transcript(form: type[Seam]) -> list[object]:
        driven = Driven(form, two_banks(2))
        said: list[object] = []
        driven.seam.advance = lambda: said.append("advance")
        driven.seam.begin()
        for step in steps:
            if isinstance(step, int):
                driven.seam.isolate(step)
                node = product(WEIGHT)
            else:
                node = Node(step, [[1, 3]])
            asked = driven.ask(node)
            said.append((asked, driven.computed(node) if asked else None))
        return [*said, driven.calls, driven.seam.drain()]

    assert transcript(PythonSeam) == transcript(CSeam)


# ---- attention


@pytest.mark.parametrize("form", SEAMS)
def test_an_attentive_seam_hands_over_routings_that_are_all_hits_too(form: type[Seam]) -> None:
    driven = Driven(form, two_banks(1))
    driven.seam.resident[:] = b"\1" * len(driven.seam.resident)
    driven.seam.begin()
    assert driven.asked_and_computed(Node(b"ffn_moe_topk-0", [[6, 1]]))
    assert [] == driven.calls
    assert [[expert_key(0, 6), expert_key(0, 1)]] == driven.seam.drain()

    driven.seam.attentive = True
    driven.seam.begin()
    assert driven.asked_and_computed(Node(b"ffn_moe_topk-0", [[2, 5]]))
    assert [(0, [expert_key(0, 2), expert_key(0, 5)])] == driven.calls
    assert [] == driven.seam.drain()

    driven.seam.attentive = False
    driven.seam.begin()
    assert driven.asked_and_computed(Node(b"ffn_moe_topk-0", [[2, 5]]))
    assert 1 == len(driven.calls)
