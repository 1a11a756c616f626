"""The cache of an open engine is given more or less memory between tokens, and less is less for real."""

from __future__ import annotations

import gc
import math
import sys
import threading
from pathlib import Path

import pytest

import bmoe
from bmoe.errors import NativeError, ProfileError
from bmoe.pressure import Advice
from bmoe.testing.models import TinyModels
from bmoe_plugins.caches.lru import Lru

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident pages are only told on Linux")

PROFILE = {"model": {"threads": 1, "ctx": 256, "ubatch": 16}, "cache": {"policy": "lru"}}
PROMPT = [(i * 37 + 11) % 512 for i in range(50)]
MIB = 1 << 20


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory):
    """Experts of about 100 MiB, so that pages of theirs are more than noise."""
    from dataclasses import replace

    from bmoe.synth import SHAPES

    wide = replace(SHAPES["tiny-qwen3moe"], name="wide", n_expert=32, n_ff_exp=512)
    return str(TinyModels(tmp_path_factory.mktemp("models")).path(wide, "F32", layers=2))


def anonymous() -> int:
    gc.collect()
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Anonymous:"))


def run(conversation, n=6):
    assert n == len(list(conversation.generate(PROMPT, n, hash_logits=True)))
    return conversation.summary


@pytest.mark.parametrize("everything", [True, False], ids=["all resident", "most resident"])
def test_shrinking_gives_pages_back_and_the_output_stays(model, everything):
    start = 10_000 if everything else 80
    with bmoe.open(PROFILE, model, [f"cache.budget_mb={start}"]) as engine, engine.conversation() as conversation:
        before = run(conversation)
        store = engine.stream.store
        assert store.held_bytes > 60 * MIB
        had, held = anonymous(), store.held_bytes

        now = engine.resize_cache(20)

        assert now == store.held_bytes <= 20 * MIB == store.budget_bytes
        assert had - anonymous() >= 0.97 * (held - now)
        small = anonymous()
        for _ in range(3):
            after = run(conversation)
            assert before.logits_sha256 == after.logits_sha256
        # what comes back takes no more than the budget
        assert anonymous() - small <= 20 * MIB - now + 2 * MIB
        assert (20 * MIB, 1) == (after.cache_budget_bytes, after.cache_resizes)
        assert after.cache_held_bytes <= 20 * MIB
        assert 20 * MIB == engine.record.resolved["cache"]["budget_bytes"]


def test_growing_by_hand_reaches_what_all_experts_hold_and_then_nothing_is_read(model):
    with bmoe.open(PROFILE, model, ["cache.budget_mb=20"]) as engine, engine.conversation() as conversation:
        before = run(conversation)
        engine.resize_cache(10_000)
        assert engine.stream.store.budget_bytes < 10_000 * MIB
        run(conversation)
        after = run(conversation)

        assert before.logits_sha256 == after.logits_sha256
        assert (0, 1.0) == (after.bytes_read, after.hit_rate)


def test_a_budget_below_one_cycle_is_refused_with_the_number_needed_and_changes_nothing(model):
    with bmoe.open(PROFILE, model, ["cache.budget_mb=20"]) as engine:
        with pytest.raises(ProfileError) as caught:
            engine.resize_cache(1.5)
        need = math.ceil(engine.plan.budget.cycle_bytes / MIB)
        assert f"resize_cache(1.5) is below what one token uses (4 experts); give at least {need}, " in str(
            caught.value
        )
        assert (20 * MIB, 0) == (engine.stream.store.budget_bytes, engine.cache_size.resizes)
        engine.resize_cache(need)


def test_a_policy_that_hits_below_the_cycle_may_have_less(model, monkeypatch):
    monkeypatch.setattr(Lru, "below_cycle", True)
    with bmoe.open(PROFILE, model, ["cache.budget_mb=20"]) as engine:
        engine.resize_cache(3)
        assert 3 * MIB == engine.stream.store.budget_bytes
        with pytest.raises(ProfileError, match="is below what one token uses"):
            engine.resize_cache(0.01)


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, True, "20"])
def test_what_is_no_size_is_refused(model, wrong):
    with bmoe.open(PROFILE, model, ["cache.budget_mb=20"]) as engine, pytest.raises(ProfileError, match="no number of"):
        engine.resize_cache(wrong)


@pytest.mark.parametrize("off", ["cache.budget_mb=0", "stream.enabled=false"])
def test_a_cache_that_is_off_is_refused_in_one_line(model, off):
    with bmoe.open(PROFILE, model, [off]) as engine, pytest.raises(ProfileError) as caught:
        engine.resize_cache(20)
    assert "the cache is off and cannot be resized; open with cache.budget_mb above 0" == str(caught.value)


def test_inside_a_decode_it_is_refused_and_the_decode_goes_on(model, monkeypatch):
    caught = []
    with bmoe.open(PROFILE, model, ["cache.budget_mb=20"]) as engine, engine.conversation() as conversation:
        before = run(conversation)
        touch = Lru.touch

        def resize(policy, keys):
            try:
                engine.resize_cache(30)
            except NativeError as error:
                caught.append(error)
            touch(policy, keys)

        monkeypatch.setattr(engine.stream.store, "_touch", lambda keys: resize(engine.hot.policy, keys))
        assert before.logits_sha256 == run(conversation).logits_sha256
        assert "between two tokens" in str(caught[0])
        assert 20 * MIB == engine.stream.store.budget_bytes


def test_another_thread_may_resize_while_tokens_are_generated(model):
    with bmoe.open(PROFILE, model, ["cache.budget_mb=60"]) as engine, engine.conversation() as conversation:
        expected = run(conversation, 12).logits_sha256
        sizes, failed, done = [60, 12, 30, 9, 50, 15], [], threading.Event()

        def other():
            try:
                while not done.is_set():
                    for size in sizes:
                        assert engine.resize_cache(size) <= size * MIB
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        try:
            for _ in range(3):
                assert expected == run(conversation, 12).logits_sha256
        finally:
            done.set()
            thread.join()
        assert not failed
        assert engine.cache_size.resizes > len(sizes)


def test_a_closed_engine_is_refused(model):
    engine = bmoe.open(PROFILE, model, ["cache.budget_mb=20"])
    engine.close()
    with pytest.raises(NativeError, match="closed"):
        engine.resize_cache(10)


# ---- the watch


class Scripted:
    """A watch that gives the advice of a list, one a token."""

    def __init__(self, *advice):
        self.advice, self.seen = list(advice), []

    def sample(self, budget_bytes):
        self.seen.append(budget_bytes)
        return self.advice.pop(0) if self.advice else None


def test_the_watch_is_asked_after_every_token_and_its_advice_is_taken(model, capsys):
    with bmoe.open(PROFILE, model, ["cache.budget_mb=40"]) as engine, engine.conversation() as conversation:
        expected = run(conversation).logits_sha256
        engine.cache_size.watch.close()
        engine.cache_size.watch = Scripted(
            None, Advice("much", 30 * MIB), None, Advice("more", 50 * MIB), Advice("most", None)
        )
        summary = run(conversation)

        assert [40 * MIB] * 2 + [30 * MIB] * 4 == engine.cache_size.watch.seen
        assert (expected, 30 * MIB, 1) == (summary.logits_sha256, summary.cache_budget_bytes, summary.cache_resizes)
        engine.cache_size.watch = None
    told = capsys.readouterr()
    assert "memory is short: the cache shrinks" in told.out + told.err


@pytest.mark.parametrize(
    ("watch", "kind"), [("off", "NoneType"), ("warn", "PressureWatch"), ("shrink", "PressureWatch")]
)
def test_the_profile_chooses_the_watch(model, watch, kind):
    with bmoe.open(PROFILE, model, ["cache.budget_mb=20", f'cache.watch="{watch}"']) as engine:
        assert kind == type(engine.cache_size.watch).__name__
