"""Both forms of the eval hook see, stop and fail real decodes of a tiny model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bmoe.contracts import BankFacts, ExpertKey
from bmoe.layout import read_model
from bmoe.native.compiled import CSeam, make_seam
from bmoe.native.evalhook import PythonSeam, Seam
from bmoe.native.model import Context, ContextOptions, Model
from bmoe.synth import write_model
from bmoe_plugins.archs.table import bmoe_archs

from .nodes import COMPILED, SEAMS


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
