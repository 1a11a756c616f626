"""Both forms of the eval hook do the same on real tensors; failures end the decode and surface as themselves."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.contracts import ExpertKey, expert_key
from bmoe.errors import NativeError
from bmoe.native import compiled
from bmoe.native.compiled import CSeam, compiled_seam_missing, make_seam
from bmoe.native.evalhook import PythonSeam, Seam

from .nodes import COMPILED, SEAMS, Driven, Node, banks_of

# ---- held equal


@dataclass(frozen=True)
class Case:
    """One decode: banks, which entries are resident, the nodes in graph order, and whether the graph is cut."""

    sizes: list[tuple[int, int]]
    resident: list[bool]
    nodes: list[tuple[bytes, list[list[int]], int, int]]
    cut: bool


LOOK_ALIKES = [
    b"ffn_moe_topk-",
    b"ffn_moe_topk-0x",
    b"ffn_moe_topk-00",
    b"ffn_moe_topk-01",
    b"ffn_moe_topk--1",
    b"ffn_moe_topk- 1",
    b"ffn_moe_topk-3x",
    b"ffn_moe_topk-999999",
    b"ffn_moe_topk-99999999999999999999",
    b"ffn_moe_topk_2-1",
    b"ffn_moe_topk-1 (view)",
    b"ffn_moe_topk",
    b"ffn_moe_weights-1",
    b"ffn_moe_logits-0",
    b"ffn_moe_argsort-0",
    b"Qcur-0",
    b"",
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True))
    sizes = [(layer, draw(st.integers(1, 9))) for layer in sorted(layers)]
    total = sum(n for _, n in sizes)
    resident = draw(st.lists(st.booleans() | st.just(True), min_size=total, max_size=total))
    count = draw(st.integers(1, 8))
    nodes = []
    for _ in range(count):
        layer, n_expert = draw(st.sampled_from(sizes))
        name = draw(st.just(b"ffn_moe_topk-%d" % layer) | st.sampled_from(LOOK_ALIKES))
        good = st.integers(0, n_expert - 1)
        chosen = good if draw(st.integers(0, 5)) else good | st.sampled_from([-1, -(2**31), n_expert, 2**31 - 1])
        slots, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 5))
        ids = draw(st.lists(st.lists(chosen, min_size=slots, max_size=slots), min_size=tokens, max_size=tokens))
        nodes.append((name, ids, draw(st.integers(1, 3)), draw(st.integers(0, 5))))
    return Case(sizes, resident, nodes, draw(st.booleans()))


def transcript(form: type[Seam], case: Case) -> list[object]:
    """Everything that a seam answers and does in one decode."""
    driven = Driven(form, banks_of(case.sizes))
    driven.seam.resident[:] = bytes(case.resident)
    driven.seam.begin(cut=case.cut)
    said: list[object] = []
    for name, ids, step, margin in case.nodes:
        node = Node(name, ids, step, margin)
        asked = driven.ask(node)
        said.append((asked, driven.computed(node) if asked else None, driven.aborts))
    return [*said, driven.calls, driven.seam.drain(), driven.outcome(), driven.seam.drain()]


@COMPILED
@given(cases())
def test_both_forms_answer_log_and_fail_alike(case: Case) -> None:
    assert transcript(PythonSeam, case) == transcript(CSeam, case)


@COMPILED
@given(st.lists(st.sampled_from(LOOK_ALIKES) | st.binary(max_size=20).filter(lambda b: 0 not in b), max_size=20))
def test_only_the_routing_node_of_a_known_layer_is_isolated(names: list[bytes]) -> None:
    sizes = [(0, 4), (1, 4), (3, 4)]
    python, c = (Driven(form, banks_of(sizes)) for form in (PythonSeam, CSeam))
    for driven in (python, c):
        driven.seam.begin()
    known = {b"ffn_moe_topk-0", b"ffn_moe_topk-1", b"ffn_moe_topk-3"}
    for name in [*names, *known, b"ffn_moe_topk-2", b"ffn_moe_topk-4"]:
        node = Node(name, [[0, 1]])

        assert ((name in known),) * 2 == (python.ask(node), c.ask(node))


# ---- what both promise


@pytest.mark.parametrize("form", SEAMS)
def test_keys_are_handed_over_once_in_the_order_of_their_last_use(form: type[Seam]) -> None:
    driven = Driven(form, banks_of([(3, 8)]))
    driven.seam.begin()

    assert driven.computed(Node(b"ffn_moe_topk-3", [[5, 1, 2], [1, 5, 7], [0, 1, 6]], step=2, margin=3))

    assert [(0, [expert_key(3, expert) for expert in (2, 5, 7, 0, 1, 6)])] == driven.calls
    assert [] == driven.seam.drain()


@pytest.mark.parametrize("form", SEAMS)
def test_a_routing_of_hits_is_only_logged(form: type[Seam]) -> None:
    driven = Driven(form, banks_of([(0, 4), (2, 4)]))
    driven.seam.resident[:] = b"\0\0\0\0\1\0\1\0"
    driven.seam.begin()

    assert driven.computed(Node(b"ffn_moe_topk-2", [[2, 0]]))
    assert driven.computed(Node(b"ffn_moe_topk-2", [[0, 2]]))

    assert [] == driven.calls
    keys = [expert_key(2, 2), expert_key(2, 0)]
    assert [keys, keys[::-1]] == driven.seam.drain()
    assert [] == driven.seam.drain()


@pytest.mark.parametrize("form", SEAMS)
@pytest.mark.parametrize("expert", [1, 77])
def test_a_cut_graph_ends_at_its_first_routing_and_nobody_hears_of_it(form: type[Seam], expert: int) -> None:
    """Not even of ids that are none, which are not looked at. The next decode goes on as if there had been no cut."""
    driven = Driven(form, banks_of([(2, 4)]))
    driven.seam.attentive = True
    driven.seam.begin(cut=True)
    node = Node(b"ffn_moe_topk-2", [[expert, 0]])

    assert (driven.ask(node), driven.computed(node), driven.aborts) == (True, False, False)
    assert ([], [], "fine", False) == (driven.calls, driven.seam.drain(), driven.outcome(), driven.seam.stopped)

    driven.seam.begin()
    assert driven.asked_and_computed(Node(b"ffn_moe_topk-2", [[1, 0]]))
    assert [(0, [expert_key(2, 1), expert_key(2, 0)])] == driven.calls


@pytest.mark.parametrize("form", SEAMS)
@pytest.mark.parametrize(("expert", "said"), [(4, "expert 4 of 4"), (-3, "expert below 0 of 4")])
def test_an_id_out_of_range_ends_the_decode_and_names_layer_and_expert(
    form: type[Seam], expert: int, said: str
) -> None:
    driven = Driven(form, banks_of([(7, 4)]))
    driven.seam.resident[:] = b"\1" * 4
    driven.seam.begin()

    assert not driven.computed(Node(b"ffn_moe_topk-7", [[0, 1], [expert, 2]]))

    assert driven.aborts
    assert [] == driven.calls
    with pytest.raises(NativeError, match=f"layer 7 routed to {said}"):
        driven.seam.finish()


@pytest.mark.parametrize("form", SEAMS)
@pytest.mark.parametrize("error", [ValueError("a plugin"), KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_what_the_handler_raises_latches_and_surfaces_as_the_same_object(
    form: type[Seam], error: BaseException
) -> None:
    driven = Driven(form, banks_of([(0, 4)]))
    node = Node(b"ffn_moe_topk-0", [[1, 2]])

    def fail(bank: int, keys: list[ExpertKey]) -> None:
        raise error

    driven.seam.handler = fail
    driven.seam.begin()
    before = (driven.ask(node), driven.aborts)
    answered = driven.computed(node)

    assert (True, False) == before
    assert not answered
    assert (True, False, True) == (driven.aborts, driven.ask(node), driven.seam.stopped)
    with pytest.raises(type(error)) as caught:
        driven.seam.finish()
    assert error is caught.value
    driven.seam.finish()  # it is raised once

    driven.seam.handler = driven.handle
    driven.seam.begin()
    assert (False, True, True) == (driven.aborts, driven.ask(node), driven.computed(node))
    assert [(0, [expert_key(0, 1), expert_key(0, 2)])] == driven.calls
    driven.seam.finish()


@pytest.mark.parametrize("form", SEAMS)
def test_of_several_failures_the_first_is_raised(form: type[Seam]) -> None:
    driven = Driven(form, banks_of([(0, 4)]))
    first = ValueError("first")
    driven.seam.begin()
    driven.seam.fail(first)
    driven.seam.fail(ValueError("second"))

    with pytest.raises(ValueError, match="first"):
        driven.seam.finish()


@pytest.mark.parametrize("form", SEAMS)
def test_stop_is_seen_by_the_next_node_and_forgotten_by_the_next_decode(form: type[Seam]) -> None:
    driven = Driven(form, banks_of([(0, 4)]))
    node = Node(b"ffn_moe_topk-0", [[1]])
    driven.seam.begin()
    thread = threading.Thread(target=driven.seam.stop)
    thread.start()
    thread.join()

    assert (True, False, False) == (driven.aborts, driven.ask(node), driven.computed(node))
    assert [] == driven.calls
    driven.seam.finish()  # being stopped is no failure
    driven.seam.begin()
    assert (False, True) == (driven.aborts, driven.ask(node))


@pytest.mark.parametrize("form", SEAMS)
def test_a_routing_that_nobody_handles_is_an_error(form: type[Seam]) -> None:
    driven = Driven(form, banks_of([(0, 4)]))
    driven.seam.handler = form(banks_of([(0, 4)])).handler
    driven.seam.begin()

    assert not driven.computed(Node(b"ffn_moe_topk-0", [[1]]))
    with pytest.raises(NativeError, match="before anything was bound"):
        driven.seam.finish()


@COMPILED
def test_a_full_log_is_carried_over_without_losing_or_reordering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_LOG_RECORDS", 8)
    python, c = (Driven(form, banks_of([(0, 6), (1, 6)])) for form in (PythonSeam, CSeam))
    expected = []
    for driven in (python, c):
        driven.seam.resident[:] = b"\1" * 12
        driven.seam.begin()
        for turn in range(200):
            layer, first, second = turn % 2, turn % 6, (turn + 1 + turn % 4) % 6
            assert driven.computed(Node(b"ffn_moe_topk-%d" % layer, [[first, second]]))
            expected.append([expert_key(layer, first), expert_key(layer, second)])
        driven.seam.finish()

    assert expected[:200] == python.seam.drain()
    assert expected[200:] == c.seam.drain()
    assert [] == c.calls


@COMPILED
def test_an_interrupt_before_the_first_statement_of_the_callback_is_not_lost() -> None:
    driven = Driven(CSeam, banks_of([(0, 4)]))
    seam = driven.seam
    assert isinstance(seam, CSeam)
    seam.begin()
    driven.computed(Node(b"ffn_moe_topk-0", [[1]]))
    seam._completed -= 1  # as if the callback had been entered and had not run

    with pytest.raises(KeyboardInterrupt):
        seam.finish()


def test_a_seam_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    banks = banks_of([(0, 4)])
    assert "python" == make_seam("python", banks).name
    assert ("python" if compiled_seam_missing() else "c") == make_seam("auto", banks).name

    monkeypatch.setattr(compiled, "compiled_seam_missing", lambda: "_seam is not compiled (why)")
    assert "python" == make_seam("auto", banks).name
    with pytest.raises(NativeError, match="_seam is not compiled .* install a C compiler"):
        make_seam("c", banks)
