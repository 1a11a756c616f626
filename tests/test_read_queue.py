"""What the queue of reads promises when a device fails half way; the gates of fetchers prove the rest on real ones."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe.contracts import ReadBatch
from bmoe.native import io, memory
from bmoe.native.memory import PAGE
from bmoe_plugins.fetch._queue import QueueOptions, ReadQueue


class Device:
    """Reads at once, in ``start``; ``fails`` is called before every piece."""

    capacity = 64

    def __init__(self) -> None:
        self.fails: Callable[[], None] = lambda: None
        self.started = 0
        self.ended: list[tuple[int, int]] = []
        self.result: Callable[[int], int] = lambda got: got

    def prepare(self, identity: int, pieces: Sequence[Any]) -> Any:
        return identity, [column.tolist() for column in pieces[:4]]

    def start(self, prepared: Any, first: int, count: int) -> int:
        identity, (fd, address, length, offset) = prepared
        for index in range(first, first + count):
            self.fails()
            got = io.pread(fd[index], address[index], length[index], offset[index])
            self.started += 1
            self.ended.append((identity + index, self.result(got)))
        return count

    def collect(self, least: int) -> list[tuple[int, int]]:
        ended, self.ended = self.ended, []
        return ended

    def restart(self) -> None:
        self.ended.clear()

    def close(self) -> None:
        pass


@pytest.fixture(name="world")
def _world(tmp_path: Path):
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, 64 * PAGE, dtype=np.uint8).tobytes())
    device, region = Device(), memory.reserve(64 * PAGE)
    queue = ReadQueue([io.open_data(str(path), direct=False)], lambda: device, QueueOptions(depth=4))

    def batch(first: int, count: int) -> ReadBatch:
        at = (first + np.arange(count, dtype=np.int64)) * PAGE
        length, zeros = np.full(count, PAGE, dtype=np.int64), np.zeros(count, dtype=np.int64)
        return ReadBatch(region.address + at, length, length, at, zeros, zeros)

    yield device, queue, batch, region, path.read_bytes()
    queue.close()
    region.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no thread")], ids=["interrupt", "error"])
def test_a_batch_whose_submission_was_interrupted_is_never_read_later(world, error: BaseException) -> None:
    device, queue, batch, region, content = world

    def fail() -> None:
        raise error

    device.fails = fail
    with pytest.raises(type(error)):
        queue.submit(batch(0, 8))
    device.fails = lambda: None
    memory.fill(region.address, 0xAA, 8 * PAGE)

    ticket = queue.submit(batch(8, 8))
    assert 8 * PAGE == queue.wait(ticket, 0)

    assert 8 == device.started, "nobody has a ticket for the others, and their memory is somebody else's by now"
    assert b"\xaa" * 8 * PAGE == bytes(memory.view(region.address, 8 * PAGE))
    assert content[8 * PAGE : 16 * PAGE] == bytes(memory.view(region.address + 8 * PAGE, 8 * PAGE))


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_a_read_that_was_interrupted_is_read_again(world, code: int) -> None:
    device, queue, batch, region, content = world
    device.result = lambda got: -code

    assert 4 * PAGE == queue.wait(queue.submit(batch(3, 4)), 0)
    assert content[3 * PAGE : 7 * PAGE] == bytes(memory.view(region.address + 3 * PAGE, 4 * PAGE))


def test_a_drive_that_never_answers_otherwise_is_not_asked_for_ever(world, monkeypatch: pytest.MonkeyPatch) -> None:
    device, queue, batch, _, _ = world
    device.result = lambda got: -errno.EINTR
    monkeypatch.setattr(io, "pread", lambda *arguments: -errno.EINTR)

    with pytest.raises(Exception, match="EINTR"):
        queue.wait(queue.submit(batch(0, 1)), 0)
