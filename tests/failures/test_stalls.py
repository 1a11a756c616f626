"""A drive that answers late costs time and nothing else, and a file that is replaced while it is open is still read."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

import bmoe
from bmoe.native import aio, io, uring

from .runs import EVICTING, LONG, PROFILE, run, stop_of
from .test_reads import FETCHERS


class Stall:
    """The n-th read below every plugin is not answered before :meth:`release`; ``met`` is set when it was reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
        self.met, self._answer = threading.Event(), threading.Event()
        self._left, self._lock = n, threading.Lock()
        real_pread, real_collect, real_ring = io.pread, aio.AioCalls.collect, uring.Ring.collect

        def pread(fd: int, address: int, nbytes: int, offset: int) -> int:
            self._pass()
            return real_pread(fd, address, nbytes, offset)

        def collect(calls: aio.AioCalls, least: int, most: int, events: int) -> int:
            self._pass()
            return real_collect(calls, least, most, events)

        def ring(calls: uring.Ring, least: int) -> list[tuple[int, int]]:
            self._pass()
            return real_ring(calls, least)

        monkeypatch.setattr(io, "pread", pread)
        monkeypatch.setattr(aio.AioCalls, "collect", collect)
        monkeypatch.setattr(uring.Ring, "collect", ring)

    def release(self) -> None:
        self._answer.set()

    def _pass(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.met.set()
            assert self._answer.wait(60), "nobody released the drive"


@pytest.mark.parametrize("cancelled", [False, True], ids=["waits", "cancelled"])
@pytest.mark.parametrize("overlap", ["off", "projection"])
@pytest.mark.parametrize("fetcher", FETCHERS)
def test_a_drive_that_stalls_is_waited_for_or_given_up_when_it_answers(
    model: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, fetcher, overlap: str, cancelled: bool
) -> None:
    plugin, lanes = fetcher
    settings = [f"fetch.plugin={plugin}", f"fetch.lanes={lanes}", f"stream.overlap={overlap}"]
    with bmoe.open(PROFILE, model, [EVICTING, *settings]) as engine, engine.conversation() as conversation:
        fresh = run(conversation, LONG)
        stall = Stall(monkeypatch, 5)
        found = []

        def generate() -> None:
            list(conversation.generate(LONG, 6, hash_logits=True))
            found.append(conversation.summary.logits_sha256 if conversation.summary is not None else None)

        thread = threading.Thread(target=generate)
        thread.start()
        assert stall.met.wait(60)
        if cancelled:
            conversation.cancel()
        assert thread.is_alive()
        assert found == []
        stall.release()
        thread.join(60)

        assert ("cancelled" if cancelled else "length") == stop_of(conversation)
        assert cancelled or found == [fresh]
        monkeypatch.undo()
        assert fresh == run(conversation, LONG)


@pytest.mark.parametrize("fetcher", FETCHERS)
def test_a_file_that_is_replaced_while_open_is_read_as_it_was(model: str, tmp_path: Path, fetcher) -> None:
    plugin, lanes = fetcher
    path = tmp_path / "model.gguf"
    shutil.copyfile(model, path)
    settings = [EVICTING, f"fetch.plugin={plugin}", f"fetch.lanes={lanes}"]
    with bmoe.open(PROFILE, str(path), settings) as engine, engine.conversation() as conversation:
        fresh = run(conversation, LONG)
        other = tmp_path / "other"
        other.write_bytes(b"\xaa" * path.stat().st_size)
        os.replace(other, path)

        assert fresh == run(conversation, LONG)
