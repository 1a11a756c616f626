"""Opens a model without reading its experts: inaccessible memory over the expert ranges of llama.cpp's own mapping.

llama.cpp maps the file with MAP_POPULATE, which reads all of it (``llama_mmap`` in src/llama-mmap.cpp), and has no
parameter against that. So a thread waits for the mapping to appear while ``llama_model_load_from_file`` runs and takes
the expert ranges away: the populate skips them, and an expert tensor that was never rebound faults instead of silently
reading the mapping. If the thread comes too late only time and bytes are lost, and they are reported.

When llama.cpp has placed its tensors it unmaps what it has no use for, such as a head for next-token prediction that is
not loaded. Those addresses may then be anybody's. So everything is taken before: the load itself waits for it, in the
progress callback, which is first called when all mappings are there.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable

from bmoe.contracts import ModelFacts, ShardFacts
from bmoe.errors import NativeError
from bmoe.native import memory

_ASK = 2 << 20
"""Bytes per request to read ahead: the kernel cuts longer ones to the device's window and forgets the rest."""


def expert_ranges(facts: ModelFacts) -> list[list[tuple[int, int]]]:
    """Per shard, the page-aligned file ranges that hold nothing but routed experts, sorted and merged."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in facts.shards]
    for bank in (*facts.banks, *facts.nextn_banks):
        for p in bank.projections:
            ranges[p.shard].append((p.offset, p.offset + p.stride * bank.n_expert))
    merged: list[list[tuple[int, int]]] = []
    for spans in ranges:
        joined: list[list[int]] = []
        for first, last in sorted(spans):
            if joined and first - joined[-1][1] < memory.PAGE and _only_padding(joined[-1][1], first):
                joined[-1][1] = last
            else:
                joined.append([first, last])
        pages = [(memory.round_up(first), memory.round_down(last)) for first, last in joined]
        merged.append([(first, last) for first, last in pages if first < last])
    return merged


def _only_padding(end: int, start: int) -> bool:
    return start - end < 64  # gguf aligns tensors to 32 by default; anything wider may be a small tensor


class Carver:
    """Use around the load: expert ranges go out of reach once the mapping is there. ``forbidden`` counts bytes.

    ``bases`` says where each shard was mapped. Without ``read_dense`` the weights between and beside the experts are
    not read either, but can be: for whoever takes them from the file himself.
    """

    def __init__(self, facts: ModelFacts, *, read_dense: bool = True) -> None:
        self._ranges = expert_ranges(facts)
        self._shards = facts.shards
        self._read_dense = read_dense
        self._left = set(range(len(self._shards)))
        self.bases: dict[int, int] = {}
        # another engine of this process may have the same file mapped already
        self._known = {index: self._mappings(index) for index in self._left}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, name="bmoe-carve", daemon=True)
        self._between: list[tuple[int, int]] = []  # address and size of the weights between the experts
        self.forbidden = 0

    def __enter__(self) -> Carver:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def progress(self) -> bool:
        """For llama.cpp's progress callback: the first call takes what the thread has missed; always True."""
        if not self._stop.is_set():
            self._watched(self._sweep)
            self._watched(self._allow_reading)
            self._stop.set()
        return True

    def _allow_reading(self) -> None:
        """Here the populate is over, and llama.cpp has not given anything back yet."""
        for address, nbytes in () if self._read_dense else self._between:
            memory.allow_reading(address, nbytes)

    def finish(self) -> None:
        """After the load: NativeError if a mapping is nowhere to be found; raises what failed while it ran."""
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        for address, nbytes in self._between:
            memory.read_ahead(address, nbytes, allowed=True)
        lost = [index for index in sorted(self._left) if self._ranges[index]]
        if lost and memory.count_mappings():
            missing = ", ".join(self._shards[index].path for index in lost)
            raise NativeError(f"{missing}: the model's mapping was not found in this process; was the file replaced?")

    def _watch(self) -> None:
        while self._left and self._failure is None and not self._stop.wait(0.0005):
            self._watched(self._sweep)

    def _watched(self, work: Callable[[], None]) -> None:
        """Nothing may cross C or end in a thread: finish() raises it, on the thread that opens."""
        with self._lock:
            try:
                if self._failure is None and not self._stop.is_set():
                    work()
            except BaseException as error:  # noqa: BLE001
                self._failure = error

    def _mappings(self, index: int) -> set[int]:
        path = os.path.realpath(self._shards[index].path)
        return memory.file_mappings(os.stat(path).st_ino, path)

    def _sweep(self) -> None:
        for index in sorted(self._left):
            for base in self._mappings(index) - self._known[index]:
                self.bases[index] = base
                self._carve(base, self._shards[index], self._ranges[index])
                self._left.discard(index)

    def _carve(self, base: int, shard: ShardFacts, ranges: list[tuple[int, int]]) -> None:
        # One call takes everything away, so that a populate under way stops at once; then the weights between the
        # experts come back. Nothing reads them before the load returns. Faults in them must not read around: a window
        # of megabytes would bring in the experts. So what is wanted is asked for exactly.
        if self._read_dense and not ranges:
            return
        start, end = (ranges[0][0], ranges[-1][1]) if self._read_dense else (0, memory.round_up(shard.nbytes))
        memory.forbid(base + start, end - start)
        fd = os.open(shard.path, os.O_RDONLY)
        try:
            for (_, first), (last, _) in itertools.pairwise([(start, start), *ranges, (end, end)]):
                if first < last:
                    memory.map_file(base + first, last - first, fd, first, readable=self._read_dense)
                    memory.read_ahead(base + first, last - first, allowed=False)
                    self._between.append((base + first, last - first))
                    for at in range(first, last, _ASK) if self._read_dense else ():
                        os.posix_fadvise(fd, at, min(_ASK, last - at), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)
        self.forbidden += sum(last - first for first, last in ranges)
