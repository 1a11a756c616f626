"""Both forms of the eval hook do the same on real tensors; failures end the decode and surface as themselves."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.contracts import BankFacts, ExpertKey, expert_key
from bmoe.errors import NativeError
from bmoe.layout import read_model
from bmoe.native import evalhook, lib, tensor
from bmoe.native.evalhook import CSeam, PythonSeam, Seam, compiled_seam_missing, make_seam
from bmoe.native.model import Context, ContextOptions, Model
from bmoe.synth import write_model
from bmoe_plugins.archs.qwen3moe import bmoe_archs

COMPILED = pytest.mark.skipif(bool(compiled_seam_missing()), reason="the seam is not compiled")
SEAMS = [pytest.param(CSeam, marks=COMPILED, id="c"), pytest.param(PythonSeam, id="python")]


def banks_of(sizes: Sequence[tuple[int, int]]) -> list[BankFacts]:
    """Banks from (layer, n_expert)."""
    return [BankFacts(layer, 0, n_expert, min(2, n_expert), ()) for layer, n_expert in sizes]


class Node:
    """A real ``ggml_tensor`` in memory: a view of ids inside a wider, possibly strided matrix."""

    def __init__(self, name: bytes, ids: Sequence[Sequence[int]], step: int = 1, margin: int = 0) -> None:
        """``step``: int32s from slot to slot. ``margin``: int32s of another expert between the rows."""
        slots, tokens = len(ids[0]), len(ids)
        row = (slots - 1) * step + 1 + margin
        self._data = (ctypes.c_int32 * (row * tokens))(*[-77] * (row * tokens))
        for token, chosen in enumerate(ids):
            for slot, expert in enumerate(chosen):
                self._data[token * row + slot * step] = expert
        self._tensor = tensor.GgmlTensor(type=tensor.TYPE_I32, name=name, data=ctypes.addressof(self._data))
        self._tensor.ne[:] = [slots, tokens, 1, 1]
        self._tensor.nb[:] = [4 * step, 4 * row, 4 * row * tokens, 4 * row * tokens]
        self.address = ctypes.addressof(self._tensor)


class Driven:
    """A seam installed in real context parameters and called through them, as llama.cpp would."""

    def __init__(self, form: type[Seam], banks: Sequence[BankFacts]) -> None:
        self.seam = form(banks)
        self._params = lib.llama().llama_context_default_params()
        self.seam.install(self._params)
        self.calls: list[tuple[int, list[ExpertKey]]] = []
        self.seam.handler = self.handle

    def handle(self, bank: int, keys: list[ExpertKey]) -> None:
        self.calls.append((bank, list(keys)))

    def ask(self, node: Node) -> bool:
        return bool(self._params.cb_eval(node.address, True, self._params.cb_eval_user_data))

    def computed(self, node: Node) -> bool:
        return bool(self._params.cb_eval(node.address, False, self._params.cb_eval_user_data))

    @property
    def aborts(self) -> bool:
        return bool(self._params.abort_callback(self._params.abort_callback_data))

    def outcome(self) -> str:
        """How the decode would end."""
        try:
            self.seam.finish()
        except NativeError as error:
            return str(error)
        return "fine"


# ---- held equal


@dataclass(frozen=True)
class Case:
    """One decode: banks, which entries are resident, and the nodes in graph order."""

    sizes: list[tuple[int, int]]
    resident: list[bool]
    nodes: list[tuple[bytes, list[list[int]], int, int]]


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
    return Case(sizes, resident, nodes)


def transcript(form: type[Seam], case: Case) -> list[object]:
    """Everything that a seam answers and does in one decode."""
    driven = Driven(form, banks_of(case.sizes))
    driven.seam.resident[:] = bytes(case.resident)
    driven.seam.begin()
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
    monkeypatch.setattr(evalhook, "_LOG_RECORDS", 8)
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

    monkeypatch.setattr(evalhook, "compiled_seam_missing", lambda: "_seam is not compiled (why)")
    assert "python" == make_seam("auto", banks).name
    with pytest.raises(NativeError, match="_seam is not compiled .* install a C compiler"):
        make_seam("c", banks)


# ---- real decodes


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_model(tmp_path_factory.mktemp("evalhook") / "tiny.gguf", "tiny-qwen3moe")
    facts = read_model(str(path), {row.name: row for row in bmoe_archs()})
    model = Model(facts, keep_experts_out=False)
    yield model
    model.close()


def real_banks(model: Model) -> list[BankFacts]:
    return list(read_model(model.path, {row.name: row for row in bmoe_archs()}).banks)


@pytest.mark.parametrize("form", SEAMS)
def test_a_real_decode_shows_every_routing_once_in_layer_order(form: type[Seam], model: Model) -> None:
    seam = form(real_banks(model))
    seen: list[tuple[int, int]] = []
    seam.handler = lambda bank, keys: seen.append((bank, len(keys)))
    with Context(model, ContextOptions(ctx=64, ubatch=16), callbacks=seam) as context:
        seam.begin()
        code = context.decode([1])
        seam.finish()

    assert 0 == code
    assert [(bank, 2) for bank in range(4)] == seen


@COMPILED
def test_both_forms_see_the_same_routings_of_a_real_prompt(model: Model) -> None:
    logs = []
    for form in (PythonSeam, CSeam):
        seam = form(real_banks(model))
        seam.resident[:] = b"\1" * len(seam.resident)
        with Context(model, ContextOptions(ctx=256, ubatch=64), callbacks=seam) as context:
            for start in (0, 40, 80):
                seam.begin()
                assert 0 == context.decode(list(range(start + 10, start + 50)))
                seam.finish()
        logs.append(seam.drain())

    assert 12 == len(logs[0])
    assert logs[0] == logs[1]


@pytest.mark.parametrize("form", SEAMS)
def test_stop_from_another_thread_ends_a_real_decode(form: type[Seam], model: Model) -> None:
    entered = threading.Event()
    codes: list[int] = []
    seam = form(real_banks(model))
    routed: list[int] = []

    def handle(bank: int, keys: list[ExpertKey]) -> None:
        routed.append(bank)
        entered.set()

    seam.handler = handle
    options = ContextOptions(ctx=2048, ubatch=2048)
    with Context(model, options, callbacks=seam) as context:
        seam.begin()
        thread = threading.Thread(target=lambda: codes.append(context.decode([i % 500 for i in range(2000)])))
        thread.start()
        entered.wait()
        seam.stop()
        thread.join()
        seam.finish()
        assert [2] == codes
        assert seam.stopped
        assert routed[-1] < 3

        context.clear()
        seam.begin()
        assert 0 == context.decode([1, 2, 3])
        seam.finish()


@pytest.mark.parametrize("form", SEAMS)
def test_a_failing_handler_ends_a_real_decode_before_the_next_layer(form: type[Seam], model: Model) -> None:
    seam = form(real_banks(model))
    calls: list[int] = []
    error = RuntimeError("out of luck")

    def fail_in_the_second_layer(bank: int, keys: list[ExpertKey]) -> None:
        calls.append(bank)
        if bank == 1:
            raise error

    seam.handler = fail_in_the_second_layer
    with Context(model, ContextOptions(ctx=64, ubatch=16), callbacks=seam) as context:
        seam.begin()
        context.decode([1, 2, 3])
        with pytest.raises(RuntimeError) as caught:
            seam.finish()

    assert error is caught.value
    assert [0, 1] == calls


def test_a_seam_without_banks_still_stops_a_decode(model: Model) -> None:
    seam = make_seam("auto", ())
    with Context(model, ContextOptions(ctx=64, ubatch=16), callbacks=seam) as context:
        seam.begin()
        assert 0 == context.decode([1])
        seam.stop()
        assert 2 == context.decode([2])


class Unlucky(PythonSeam):
    """Is stopped just before each routing node is announced."""

    def _eval(self, address: int, ask: bool, user: int | None, *more: Any) -> bool:
        if not ask:
            self.stop()
        return super()._eval(address, ask, user, *more)


def test_a_stop_between_two_groups_gives_code_0_and_is_still_known(model: Model) -> None:
    """The reason why the code alone does not tell whether the logits are whole."""
    seam = Unlucky(real_banks(model))
    with Context(model, ContextOptions(ctx=64, ubatch=16), callbacks=seam) as context:
        seam.begin()

        assert 0 == context.decode([1])
        assert seam.stopped
