"""Budgets, contexts and prompts that do not fit are refused by name, and a smaller one is served."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

import bmoe
from bmoe import Engine
from bmoe.errors import ModelError, ProfileError

from .runs import LONG, PROFILE, expect, one_line, run

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of address space are Linux's")


def test_a_budget_below_one_cycle_is_refused_with_the_number_needed(model: str) -> None:
    text = expect(ProfileError, model, "cache.policy=lru", "cache.budget_mb=0.5")

    assert "cache.budget_mb = 0.5 is below what one token uses (8 experts)" in text
    needed = int(text.partition("give at least ")[2].partition(",")[0])
    with bmoe.open(PROFILE, model, ["cache.policy=lru", f"cache.budget_mb={needed}"]) as engine:
        assert engine.plan.budget.bytes == needed << 20


def test_an_automatic_budget_below_one_cycle_becomes_0_with_a_notice(model: str, expected: dict[str, str]) -> None:
    with bmoe.open(PROFILE, model, ["cache.ceil_mb=0.5"]) as engine, engine.conversation() as conversation:
        assert 0 == engine.plan.budget.bytes
        (notice,) = engine.record.notices
        assert 'cache.budget_mb = "auto" became 0' in notice
        assert "one token uses 1" in notice
        assert expected["PROMPT"] == run(conversation)


def limited(model: str, room: int, failing: str) -> subprocess.CompletedProcess[str]:
    """Run ``failing`` with ``room`` bytes of address space left, then lift the limit and generate three tokens."""
    program = f"""
import resource
import bmoe
def opened(*overrides):
    return bmoe.open({PROFILE!r}, {model!r}, ["fetch.plugin=pread", "fetch.lanes=1", *overrides])
opened().close()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (used + {room}, hard))
try:
    {failing}
except bmoe.BmoeError as error:
    print(type(error).__name__, error)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
with opened() as engine:
    print(len(list(engine.conversation().generate([1, 2, 3], 3))))
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


@LINUX
def test_a_context_too_big_for_memory_is_an_error_that_names_the_knob(model: str) -> None:
    done = limited(model, 1 << 30, "opened('model.ctx=4194304')")

    assert 0 == done.returncode, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("NativeError llama.cpp cannot create a context of 4194304 tokens: ")
    assert first.endswith("; lower model.ctx or model.ubatch")
    assert "3" == second


@LINUX
def test_memory_for_the_experts_that_is_not_granted_is_an_error_not_a_crash(model: str) -> None:
    done = limited(model, 1 << 30, "from bmoe.native import memory; memory.reserve(2 << 30)")

    assert 0 == done.returncode, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("NativeError cannot reserve 2048 MiB of address space")
    assert "3" == second


@pytest.fixture(name="engine")
def _engine(model: str) -> Iterator[Engine]:
    with bmoe.open(PROFILE, model, ["model.ctx=32"]) as engine:
        yield engine


def test_a_prompt_longer_than_the_context_is_refused_and_the_next_one_is_served(
    engine: Engine, expected: dict[str, str]
) -> None:
    with engine.conversation() as conversation:
        with pytest.raises(ModelError) as caught:
            conversation.generate(LONG, 6)
        assert "the prompt has 50 tokens and the context has room for 31" in one_line(caught.value)
        assert expected["PROMPT"] == run(conversation)
