"""Ctrl-C while a model opens ends the open, is raised as itself, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import bmoe
from bmoe.errors import NativeError
from bmoe.native import interrupts, llamalog
from bmoe.testing.models import TinyModels


@pytest.fixture(autouse=True)
def _interrupts_are_heard():
    """A shell's background job starts with Ctrl-C ignored, and so would everything in it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(TinyModels(tmp_path_factory.mktemp("models")).path("tiny-qwen3moe", "Q8_0"))


def opened(model):
    return bmoe.open({"model": {"threads": 1, "ctx": 64}, "cache": {"budget_mb": 0}}, model)


def test_it_is_raised_once_the_call_is_over():
    seen = []

    def call():
        with interrupts.deferred() as waiting:
            signal.raise_signal(signal.SIGINT)
            seen.append(waiting())

    with pytest.raises(KeyboardInterrupt):
        call()
    assert [True] == seen
    assert signal.default_int_handler is signal.getsignal(signal.SIGINT)


def test_without_a_handler_or_off_the_main_thread_nothing_is_changed():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.deferred() as waiting:
            assert signal.SIG_IGN is signal.getsignal(signal.SIGINT)
            assert not waiting()
    finally:
        signal.signal(signal.SIGINT, before)

    seen = []

    def elsewhere():
        with interrupts.deferred() as waiting:
            seen.append((waiting(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert [(False, before)] == seen


def test_an_interrupt_in_any_log_line_of_the_load_ends_the_open(model, monkeypatch):
    """llama.cpp calls back for every line it logs; a signal was lost there, and the open went on."""
    lines, total = llamalog.start(), 0
    original = type(lines)._line

    def counting(level, text, user):
        nonlocal total
        total += 1
        return original(lines, level, text, user)

    callback = llamalog.lib.LogCallback(counting)
    llamalog.lib.llama().llama_log_set(callback, None)
    try:
        opened(model).close()
        everything = total
        assert everything > 20
        for at in (1, everything // 3, everything // 2):
            total = 0

            def interrupting(level, text, user, at=at):
                nonlocal total
                total += 1
                if total == at:
                    os.kill(os.getpid(), signal.SIGINT)

            stopping = llamalog.lib.LogCallback(interrupting)
            llamalog.lib.llama().llama_log_set(stopping, None)
            with pytest.raises(KeyboardInterrupt):
                opened(model)
    finally:
        llamalog.lib.llama().llama_log_set(lines._callback, None)
    with opened(model) as engine, engine.conversation() as conversation:
        assert 2 == len(list(conversation.generate("hi", 2)))


def test_the_command_ends_with_130_whenever_it_is_interrupted(model):
    """At any time after its imports: while it opens, reads the prompt or generates."""
    command = [sys.executable, "-m", "bmoe.cli", "--profile", "demo", "--model", model, "--set", "model.threads=1"]
    command += ["-p", "hi", "-n", "400", "--json"]
    for delay in (0.0, 0.02, 0.05, 0.1):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        maps = Path(f"/proc/{process.pid}/maps")
        while process.poll() is None and "libggml-base" not in maps.read_text():
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        done = '"event": "summary"' in out and '"stop": "length"' in out
        assert process.returncode == 130 or done, (delay, process.returncode, err)
        assert "Exception ignored" not in err


def test_what_was_closed_says_so(model):
    with opened(model) as engine:
        conversation = engine.conversation()
        list(conversation.generate("hi", 2))
    with pytest.raises(NativeError, match="this model is closed; open it again"):
        conversation.generate("hi", 2)
    with pytest.raises(NativeError, match="this model is closed; open it again"):
        engine.conversation()
