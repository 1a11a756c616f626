"""What a plugin raises surfaces as itself, and the next generation has the logits of a fresh run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

import bmoe
from bmoe.errors import PluginError
from bmoe.native.compiled import compiled_seam_missing
from bmoe_plugins.caches.lru import Lru
from bmoe_plugins.fetch.pread import PreadFetcher

from .runs import EVICTING, LONG, PROFILE, run, stop_of


class Fuse:
    """Makes a method of a plugin class raise ``error`` at its n-th call from when it is lit, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        self.left = -1
        self.error: BaseException | Callable[[], object] = AssertionError("never lit")
        real = getattr(owner, method)

        def call(*arguments: Any) -> Any:
            if self.left >= 0:
                self.left -= 1
                if self.left < 0:
                    if isinstance(self.error, BaseException):
                        raise self.error
                    self.error()
            return real(*arguments)

        monkeypatch.setattr(owner, method, call)


METHODS = [
    (Lru, "touch"),
    (Lru, "admit"),
    (Lru, "victim"),
    (Lru, "forget"),
    (PreadFetcher, "submit"),
    (PreadFetcher, "wait"),
]
SEAMS = ["python", pytest.param("c", marks=pytest.mark.skipif(bool(compiled_seam_missing()), reason="not compiled"))]


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize(("owner", "method"), METHODS, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("error", [ValueError("of a plugin"), KeyboardInterrupt("now")], ids=["error", "interrupt"])
def test_what_a_plugin_raises_surfaces_as_itself_and_the_conversation_generates_again(
    model: str,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    seam: str,
    owner: type,
    method: str,
    error: BaseException,
) -> None:
    fuse = Fuse(monkeypatch, owner, method)
    fuse.error = error
    overrides = [EVICTING, "fetch.plugin=pread"]
    with bmoe.open(PROFILE, model, overrides, seam=seam) as engine, engine.conversation() as conversation:
        for n in (0, 1, 4, 9):
            fuse.left = n
            with pytest.raises(type(error)) as caught:
                list(conversation.generate(LONG, 6))

            assert error is caught.value
            assert fuse.left == -1
            assert "error" == stop_of(conversation)
            assert expected["PROMPT"] == run(conversation)
        assert expected["LONG"] == run(conversation, LONG)
        assert engine.stream is not None
        assert engine.stream.store.held_bytes <= engine.stream.store.budget_bytes


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("method", ["touch", "admit", "victim"])
def test_a_plugin_that_fails_every_time_fails_with_its_first_error(
    model: str, monkeypatch: pytest.MonkeyPatch, seam: str, method: str
) -> None:
    raised: list[BaseException] = []

    def fail(*arguments: object) -> None:
        raised.append(RuntimeError(f"number {len(raised)}"))
        raise raised[-1]

    monkeypatch.setattr(Lru, method, fail)
    with bmoe.open(PROFILE, model, [EVICTING], seam=seam) as engine, engine.conversation() as conversation:
        for _ in range(2):
            raised.clear()
            with pytest.raises(RuntimeError) as caught:
                list(conversation.generate(LONG, 6))
            assert raised[0] is caught.value


@pytest.mark.skipif(not hasattr(signal, "raise_signal"), reason="no signals here")
@pytest.mark.parametrize("seam", SEAMS)
def test_a_real_interrupt_inside_a_callback_ends_the_decode(
    model: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, seam: str
) -> None:
    fuse = Fuse(monkeypatch, Lru, "touch")
    fuse.error = lambda: signal.raise_signal(signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with bmoe.open(PROFILE, model, [EVICTING], seam=seam) as engine, engine.conversation() as conversation:
            for n in (0, 3, 8):
                fuse.left = n
                with pytest.raises(KeyboardInterrupt):
                    list(conversation.generate(LONG, 6))
                assert expected["PROMPT"] == run(conversation)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_policy_that_names_a_pinned_entry_is_a_plugin_error(
    model: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Lru, "victim", lambda policy, pinned: min(pinned) if pinned else None)
        engine = bmoe.open(PROFILE, model, [EVICTING])
    with engine, engine.conversation() as conversation, pytest.raises(PluginError, match="not resident or is pinned"):
        list(conversation.generate(LONG, 6))
