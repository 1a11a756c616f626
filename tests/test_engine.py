"""Opening and closing leaves nothing behind, a failed open closes what it opened, and both seams serve alike."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import bmoe
from bmoe import engine as engines
from bmoe.contracts import BankFacts, DenseTensor, Placement
from bmoe.errors import ModelError, NativeError, ReadError
from bmoe.native import capture, memory, tensor
from bmoe.native.compiled import compiled_seam_missing
from bmoe.native.evalhook import PythonSeam, Seam
from bmoe.testing.models import TinyModels
from bmoe_plugins.dense.mmap import Mapped

PROFILE = {"model": {"threads": 1, "ctx": 128, "ubatch": 16}, "cache": {"budget_mb": 2}}
PROMPT = [5, 300, 301, 7, 280, 412, 33]
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors are counted through /proc")


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(name="model", scope="module")
def _model(models: TinyModels) -> str:
    return str(models.path())


def logits(engine: bmoe.Engine, n: int = 6) -> str:
    with engine.conversation() as conversation:
        assert n == len(list(conversation.generate(PROMPT, n, hash_logits=True)))
        assert conversation.summary is not None
        assert conversation.summary.logits_sha256 is not None
        return conversation.summary.logits_sha256


def held() -> tuple[int, int, int]:
    """Descriptors, mappings and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), memory.count_mappings(), threading.active_count()


def resident_pages() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1])


# ---- the same through either seam


@pytest.mark.skipif(bool(compiled_seam_missing()), reason="the seam is not compiled")
@pytest.mark.parametrize("budget", [0, 2, 64])
def test_both_seams_give_the_same_logits_and_figures(model: str, budget: int) -> None:
    found = []
    for seam in ("c", "python"):
        with bmoe.open(PROFILE, model, [f"cache.budget_mb={budget}"], seam=seam) as engine:
            assert seam == engine.seam.name == engine.record.resolved["seam"]
            digest = logits(engine)
            assert engine.stream is not None
            found.append((digest, engine.stream.store.counters, engine.stream.counters.read_bytes))

    assert found[0] == found[1]


def test_streaming_equals_plain_llama_cpp(model: str) -> None:
    with bmoe.open(PROFILE, model, ["stream.enabled=false"]) as engine:
        expected = logits(engine)
        assert (None, None, None) == (
            engine.stream,
            engine.record.resolved["seam"],
            engine.record.resolved["direct_io"],
        )
    with bmoe.open(PROFILE, model) as engine:
        assert expected == logits(engine)


class Unlucky(PythonSeam):
    """Once armed, is stopped just before the next routing node is announced."""

    armed = False

    def _eval(self, address: int, ask: bool, user: int | None, *more: Any) -> bool:
        if self.armed and not ask:
            self.armed = False
            self.stop()
        return super()._eval(address, ask, user, *more)


def test_a_stop_between_two_groups_is_not_taken_for_a_whole_decode(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(kind: str, banks: Sequence[BankFacts]) -> Seam:
        return Unlucky(banks)

    monkeypatch.setattr(engines, "make_seam", make)
    with bmoe.open(PROFILE, model) as engine:
        expected = logits(engine)
        assert isinstance(engine.seam, Unlucky)
        with engine.conversation() as conversation:
            stream = conversation.generate(PROMPT, 6)
            first = [next(stream).id, next(stream).id]
            engine.seam.armed = True

            assert [] == list(stream)
            assert conversation.summary is not None
            assert ("cancelled", 2) == (conversation.summary.stop, conversation.summary.tokens)
            assert PROMPT + first[:1] == conversation.tokens
        assert expected == logits(engine)


def test_what_fails_after_the_decode_does_not_hide_what_failed_in_it(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, after = ReadError("inside"), RuntimeError("after")

    def fail(error: BaseException) -> Any:
        def call(*arguments: object) -> None:
            raise error

        return call

    with bmoe.open(PROFILE, model, ["cache.budget_mb=0"]) as engine, engine.conversation() as conversation:
        expected = logits(engine)
        for both in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(engine.stream, "settle", fail(after))
                if both:
                    patch.setattr(engine.hot.fetcher, "submit", fail(inside))
                with pytest.raises((ReadError, RuntimeError)) as caught:
                    list(conversation.generate(PROMPT, 3))
            assert (inside if both else after) is caught.value
            assert [] == conversation.tokens
        assert expected == logits(engine)


# ---- nothing left behind


@LINUX
@pytest.mark.parametrize("fetcher", ["pread", "aio"])
def test_fifty_opens_and_closes_leave_no_descriptor_mapping_or_thread(model: str, fetcher: str) -> None:
    overrides = [f"fetch.plugin={fetcher}"]

    def cycle() -> None:
        with bmoe.open(PROFILE, model, overrides) as engine, engine.conversation() as conversation:
            list(conversation.generate(PROMPT, 2))

    for _ in range(3):
        cycle()
    before = held()
    for _ in range(50):
        cycle()
    after = held()

    assert before[0] == after[0]
    assert abs(before[1] - after[1]) <= 8  # the allocator's own mappings come and go
    assert before[2] == after[2]


@LINUX
def test_conversations_that_nobody_closes_are_freed(model: str) -> None:
    with bmoe.open(PROFILE, model, ["model.ctx=16384", "cache.budget_mb=64"]) as engine:
        for _ in engine.conversation().generate(PROMPT, 2):
            pass
        before = resident_pages()
        for _ in range(12):  # each KV is 16 MiB
            for _ in engine.conversation().generate(PROMPT, 2):
                pass

        assert (resident_pages() - before) * memory.PAGE < 64 << 20


def test_closing_the_engine_closes_its_conversations_and_both_may_be_closed_again(model: str) -> None:
    engine = bmoe.open(PROFILE, model)
    conversation, other = engine.conversation(), engine.conversation()
    stream = conversation.generate(PROMPT, 4)
    next(stream)
    engine.close()
    engine.close()

    with pytest.raises(NativeError, match="this conversation is closed"):
        next(stream)
    with pytest.raises(NativeError, match="this conversation is closed"):
        list(other.generate(PROMPT, 4))
    conversation.close()
    with pytest.raises(NativeError):
        engine.conversation()


@LINUX
@pytest.mark.parametrize("step", ["capture", "check_banks", "place"])
def test_an_open_that_fails_half_way_closes_what_it_opened(
    model: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    error = RuntimeError(step)

    def fail(*arguments: object, **more: object) -> Any:
        raise error

    with bmoe.open(PROFILE, model) as engine:
        expected = logits(engine)
    if step == "place":
        monkeypatch.setattr(Mapped, "place", fail)
    else:
        monkeypatch.setattr(capture, step, fail)
    before = held()
    for _ in range(10):
        with pytest.raises(RuntimeError) as caught:
            bmoe.open(PROFILE, model, ["fetch.plugin=pread"])
        assert error is caught.value
    del caught
    after = held()
    monkeypatch.undo()

    assert (before[0], before[2]) == (after[0], after[2])
    assert abs(before[1] - after[1]) <= 4
    with bmoe.open(PROFILE, model) as engine:
        assert expected == logits(engine)


# ---- what is bound, and what is said of it


def test_every_expert_tensor_points_into_the_store_and_the_rest_is_shown_to_the_dense_placement(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[DenseTensor] = []

    def place(self: Mapped, tensors: Sequence[DenseTensor], /) -> Placement:
        shown.extend(tensors)
        return Placement(placed_bytes=0, resident_bytes=None)

    monkeypatch.setattr(Mapped, "place", place)
    with bmoe.open(PROFILE, model) as engine:
        experts = {
            p.tensor: (b, i) for b, bank in enumerate(engine.facts.banks) for i, p in enumerate(bank.projections)
        }
        found = capture.capture(engine.model, experts, engine.context_options())
        assert engine.stream is not None
        addresses = engine.stream.store.addresses

        assert experts.keys() == found.tensors.keys()
        for name, (bank, projection) in experts.items():
            assert {addresses[bank][projection]} == {tensor.at(s).data for s in found.tensors[name]}
        assert {t.name for t in engine.facts.dense} == {t.name for t in shown}
        content = Path(model).read_bytes()
        for dense in shown:
            assert content[dense.offset : dense.offset + dense.nbytes] == bytes(
                memory.view(dense.address, dense.nbytes)
            )


def test_a_moved_dense_tensor_is_read_where_it_was_moved_to(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with bmoe.open(PROFILE, model) as engine:
        expected = logits(engine)
    regions: list[memory.Region] = []

    def place(self: Mapped, tensors: Sequence[DenseTensor], /) -> Placement:
        moved = {}
        for dense in tensors:
            region = memory.reserve(dense.nbytes)
            memory.view(region.address, dense.nbytes)[:] = memory.view(dense.address, dense.nbytes)
            moved[dense.name] = region.address
            regions.append(region)
        return Placement(sum(t.nbytes for t in tensors), None, moved)

    monkeypatch.setattr(Mapped, "place", place)
    with bmoe.open(PROFILE, model) as engine:
        assert expected == logits(engine)
        assert engine.placement is not None
        assert engine.facts.dense_bytes == engine.placement.placed_bytes
        output = next(i for i, t in enumerate(engine.facts.dense) if t.name == "output.weight")
        memory.fill(regions[output].address, 0, regions[output].nbytes - memory.PAGE)
        assert expected != logits(engine)
    for region in regions:
        region.close()


def test_routing_by_another_node_is_refused_by_name(model: str) -> None:
    with bmoe.open(PROFILE, model) as engine:
        found = capture.capture(
            engine.model, {p.tensor for b in engine.facts.banks for p in b.projections}, engine.context_options()
        )
        banks = engine.facts.banks
    capture.check_banks(found, banks, model)
    found.routed_by["blk.2.ffn_up_exps.weight"] = "ffn_moe_topk-1"
    with pytest.raises(ModelError, match=r"blk\.2\.ffn_up_exps\.weight is routed by node ffn_moe_topk-1, not by"):
        capture.check_banks(found, banks, model)
    del found.routed_by["blk.0.ffn_gate_exps.weight"]
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_exps\.weight is not used by the model's graph"):
        capture.check_banks(found, banks, model)


def test_two_engines_of_one_process_do_not_share_state(models: TinyModels, model: str) -> None:
    other = str(models.path(seed=1))
    with bmoe.open(PROFILE, model) as one, bmoe.open(PROFILE, other) as two:
        alone = logits(one), logits(two)
        assert alone[0] != alone[1]
        assert alone == (logits(one), logits(two))
