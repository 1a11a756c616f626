"""A failed read says in one line what is wrong, and the next generation has the logits of a fresh run."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path

import pytest

import bmoe
from bmoe.errors import ReadError
from bmoe.native import aio, io, uring

from .runs import EVICTING, LONG, PROFILE, PROMPT, one_line, run, stop_of

FETCHERS = [
    pytest.param(("pread", 1), id="pread-1"),
    pytest.param(("pread", 4), id="pread-4"),
    pytest.param(("aio", 1), id="aio", marks=pytest.mark.skipif(bool(aio.missing()), reason="no native AIO here")),
    pytest.param(("uring", 1), id="uring", marks=pytest.mark.skipif(bool(uring.missing()), reason="no io_uring here")),
]


class Fault:
    """Makes the n-th read below every plugin fail, once it is armed; ``result`` is a count or a negative errno."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.result: int | None = None
        self._lock = threading.Lock()
        real_pread, real_collect, real_ring = io.pread, aio.AioCalls.collect, uring.Ring.collect

        def pread(fd: int, address: int, nbytes: int, offset: int) -> int:
            got = real_pread(fd, address, nbytes, offset)
            if not self._strikes():
                return got
            short = self._struck()
            if short > 0:
                ctypes.memset(address + short, 0xAA, nbytes - short)
            return short

        def collect(calls: aio.AioCalls, least: int, most: int, events: int) -> int:
            got = real_collect(calls, least, most, events)
            for index in range(got):
                if self._strikes():
                    ctypes.c_int64.from_address(events + 32 * index + 16).value = self._struck()
            return got

        def ring(calls: uring.Ring, least: int) -> list[tuple[int, int]]:
            return [(identity, self._struck() if self._strikes() else n) for identity, n in real_ring(calls, least)]

        monkeypatch.setattr(io, "pread", pread)
        monkeypatch.setattr(aio.AioCalls, "collect", collect)
        monkeypatch.setattr(uring.Ring, "collect", ring)

    def arm(self, n: int, result: int) -> None:
        self.left, self.result = n, result

    def _struck(self) -> int:
        assert self.result is not None
        result = self.result
        if result > 0:
            self.arm(0, 0)  # the rest of a short read is not there either
        return result

    def _strikes(self) -> bool:
        with self._lock:
            if self.left < 0:
                return False
            self.left -= 1
            return self.left < 0


@pytest.fixture(name="fault")
def _fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    return Fault(monkeypatch)


@pytest.mark.parametrize("fetcher", FETCHERS)
@pytest.mark.parametrize("budget", ["cache.budget_mb=0", EVICTING])
@pytest.mark.parametrize(
    ("result", "said"),
    [
        (-errno.EIO, r"read of \d+ bytes at offset \d+ failed: Input/output error \(EIO\); check the drive"),
        (-errno.EINVAL, r"read of \d+ bytes at offset \d+ failed: Invalid argument \(EINVAL\)"),
        (0, r"read of \d+ bytes at offset \d+ ended after 0 of \d+ bytes; the file has \d+ bytes now"),
        (512, r"read of \d+ bytes at offset \d+ ended after \d+ of \d+ bytes; the file has \d+ bytes now"),
    ],
    ids=["EIO", "EINVAL", "empty", "short"],
)
def test_a_failed_read_names_file_offset_length_and_reason_and_the_session_goes_on(
    model: str,
    expected: dict[str, str],
    fault: Fault,
    fetcher: tuple[str, int],
    budget: str,
    result: int,
    said: str,
) -> None:
    overrides = [budget, f"fetch.plugin={fetcher[0]}", f"fetch.lanes={fetcher[1]}"]
    with bmoe.open(PROFILE, model, overrides) as engine, engine.conversation() as conversation:
        for n in (0, 3, 17, 40):
            fault.arm(n, result)
            with pytest.raises(ReadError, match=said) as caught:
                list(conversation.generate(LONG, 6))
            assert one_line(caught.value).startswith(f"{model}: read of ")
            assert "error" == stop_of(conversation)
            assert conversation.tokens == LONG[: len(conversation.tokens)]
            fault.left = -1
            assert expected["PROMPT"] == run(conversation)
        assert expected["LONG"] == run(conversation, LONG)


@pytest.mark.parametrize("fetcher", FETCHERS)
def test_a_read_that_fails_while_decoding_leaves_the_tokens_before_it(
    model: str, expected: dict[str, str], fault: Fault, fetcher: tuple[str, int]
) -> None:
    overrides = ["cache.budget_mb=0", f"fetch.plugin={fetcher[0]}", f"fetch.lanes={fetcher[1]}"]
    with bmoe.open(PROFILE, model, overrides) as engine, engine.conversation() as conversation:
        whole = [token.id for token in conversation.generate(PROMPT, 6)]
        stream = conversation.generate(PROMPT, 6)
        tokens = [next(stream).id, next(stream).id]
        fault.arm(7, -errno.EIO)
        with pytest.raises(ReadError):
            next(stream)
        fault.left = -1

        assert whole[:2] == tokens
        assert PROMPT + tokens[:1] == conversation.tokens
        assert whole[2:] == [token.id for token in conversation.generate(tokens[1:], 4, append=True)]
        assert expected["PROMPT"] == run(conversation)


def test_a_failure_in_a_later_ubatch_keeps_the_ubatches_before_it(model: str, fault: Fault) -> None:
    with bmoe.open(PROFILE, model, ["cache.budget_mb=0", "fetch.plugin=pread", "fetch.lanes=1"]) as engine:
        reads: list[int] = []
        with engine.conversation() as conversation:
            whole = [token.id for token in conversation.generate(LONG, 4)]
            assert engine.stream is not None
            before = engine.stream.counters.reads
            list(conversation.generate(LONG[:33], 1))
            reads.append(engine.stream.counters.reads - before)

            # 32 tokens are two whole ubatches; the third fails at its first read
            list(conversation.generate(LONG[:32], 1))
            fault.arm(engine.stream.counters.reads - before - reads[0], -errno.EIO)
            with pytest.raises(ReadError):
                list(conversation.generate(LONG, 4))
            fault.left = -1
            assert LONG[:32] == conversation.tokens
            assert whole == [token.id for token in conversation.generate(LONG[32:], 4, append=True)]


@pytest.mark.parametrize("fetcher", FETCHERS)
@pytest.mark.parametrize("direct", ["true", "false"])
def test_a_file_truncated_after_open_is_named_and_works_again_once_restored(
    model: str, expected: dict[str, str], tmp_path: Path, fetcher: tuple[str, int], direct: str
) -> None:
    content = Path(model).read_bytes()
    path = tmp_path / "copy.gguf"
    path.write_bytes(content)
    overrides = [
        "cache.budget_mb=0",
        f"fetch.plugin={fetcher[0]}",
        f"fetch.lanes={fetcher[1]}",
        f"fetch.direct={direct}",
    ]
    with bmoe.open(PROFILE, str(path), overrides) as engine, engine.conversation() as conversation:
        cut = engine.facts.banks[-1].projections[0].offset + 100
        assert expected["PROMPT"] == run(conversation)
        os.truncate(path, cut)
        for _ in range(2):
            with pytest.raises(ReadError) as caught:
                list(conversation.generate(PROMPT, 6))
            text = one_line(caught.value)
            assert text.startswith(f"{path}: read of ")
            assert f"; the file has {cut} bytes now, was it truncated?" in text
        with open(path, "r+b") as file:
            file.seek(cut)
            file.write(content[cut:])
        assert expected["PROMPT"] == run(conversation)
