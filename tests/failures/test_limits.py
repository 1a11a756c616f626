"""A limit that is hit while experts come in costs speed at most, and where it cannot, it is an error in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bmoe.testing.limits import let_everybody_read

from .runs import PROFILE

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="these limits are Linux's")

START = f"""
import json, os, resource
import bmoe
from bmoe.errors import BmoeError
def run(conversation, n=8):
    list(conversation.generate([(i * 37 + 11) % 512 for i in range(30)], n, hash_logits=True))
    return conversation.summary.logits_sha256
def lower(kind, room):
    # without privileges: root is granted more than others
    if os.getuid() == 0:
        os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
    key = {{resource.RLIMIT_AS: "VmSize", resource.RLIMIT_DATA: "VmData"}}[kind]
    used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
    resource.setrlimit(kind, (used + room, resource.getrlimit(kind)[1]))
def opened(*overrides):
    return bmoe.open({PROFILE!r}, MODEL, ["cache.budget_mb=1.5", *overrides])
"""


def program(model: str, text: str) -> Any:
    let_everybody_read(Path(model))
    source = START.replace("MODEL", repr(model)) + text
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
@pytest.mark.parametrize("fetcher", ["pread", "auto"])
def test_address_space_that_ends_while_experts_are_committed_changes_no_logits(
    model: str, kind: str, fetcher: str
) -> None:
    """All of it was reserved by the open; pages that cannot be moved are given back and taken anew."""
    before, after, evictions, recycled = program(
        model,
        f"""
with opened("fetch.plugin={fetcher}") as engine, engine.conversation() as conversation:
    expected = run(conversation)
    started = engine.stream.store.counters.evictions
    lower(resource.{kind}, 256 << 10)
    again = [run(conversation) for _ in range(4)]
    counters = engine.stream.store.counters
    print(json.dumps([expected, again, counters.evictions - started, engine.stream.store.frames.recycled]))
""",
    )

    assert [before] * 4 == after
    assert evictions > 50
    assert recycled > 0


def test_memory_that_is_not_granted_to_a_second_engine_is_one_line_and_the_first_goes_on(model: str) -> None:
    before, message, after = program(
        model,
        """
with opened() as engine, engine.conversation() as conversation:
    expected = run(conversation)
    lower(resource.RLIMIT_AS, 1 << 20)
    try:
        opened("cache.budget_mb=2")
        said = ""
    except (BmoeError, MemoryError) as error:
        said = type(error).__name__ + ": " + str(error)
    print(json.dumps([expected, said, run(conversation)]))
""",
    )

    assert before == after
    assert message.startswith(("NativeError: ", "ModelError: ", "MemoryError")), message
    assert "Permission denied" not in message
    assert "\n" not in message
