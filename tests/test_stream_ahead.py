"""The order of reads and products: by projection, a layer ahead in a prompt, and given up when nobody will use them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from bmoe.contracts import BankFacts, BatchContext, ProjectionFacts, ReadBatch
from bmoe.errors import NativeError, ReadError
from bmoe.native.evalhook import PythonSeam
from bmoe.store import StoreCounters
from bmoe.stream import Stream

LAYERS, EXPERTS = 4, 4
BANKS = tuple(
    BankFacts(
        layer, 0, EXPERTS, 2, tuple(ProjectionFacts(f"blk.{layer}.p{p}", f"p{p}", 0, 0, 64, "F32") for p in range(3))
    )
    for layer in range(LAYERS)
)
WEIGHTS = [[100 * layer + 10 + p for p in range(3)] for layer in range(LAYERS)]
MANY = 16


def batch(bank: int, stages: tuple[int, ...] = (0, 1, 2)) -> ReadBatch:
    """One read a stage; its shard says for which bank."""
    stage = np.array(stages, dtype=np.int64)
    return ReadBatch(stage * 0, stage * 0 + 64, stage * 0 + 64, stage * 0, stage * 0 + bank, stage)


@dataclass
class Ticket:
    name: str
    nbytes: int


@dataclass
class Script:
    """Store and fetcher in one that note what they are asked, in order."""

    said: list[str] = field(default_factory=list)
    counters: StoreCounters = field(default_factory=StoreCounters)
    resident: set[int] = field(default_factory=set)
    fits: bool = True
    there: bool = False
    fails: str = ""
    coming: set[int] = field(default_factory=set)

    def touched(self, keys: list[int]) -> None:
        self.said.append("touched")

    def stage(self, bank: int, keys: list[int]) -> ReadBatch | None:
        self.said.append(f"stage {bank}")
        return None if bank in self.resident | self.coming else batch(bank)

    def ahead(self, bank: int) -> ReadBatch | None:
        if not self.fits:
            return None
        self.coming.add(bank)
        self.said.append(f"ahead {bank}")
        return batch(bank)

    def commit(self, bank: int) -> None:
        self.said.append(f"commit {bank}")

    def abandon(self) -> None:
        self.said.append("abandon")
        self.coming.clear()

    def retire(self, bank: int, keys: list[int]) -> None:
        self.said.append(f"retire {bank}")

    def settle(self) -> None:
        self.said.append("settle")

    def submit(self, reads: ReadBatch, /, *, ahead: bool = False) -> Ticket:
        name = f"{int(reads.shard[0])}:{''.join(str(stage) for stage in reads.stage.tolist())}"
        self.said.append(f"submit {name}")
        return Ticket(name, 64 * len(reads))

    def wait(self, ticket: Ticket, upto: int, /) -> int:
        if upto >= 0:
            self.said.append(f"wait {ticket.name} {upto}")
        if self.fails == f"{ticket.name} {upto}":
            raise ReadError("gone")
        return ticket.nbytes

    def ready(self, ticket: Ticket, upto: int, /) -> bool:
        return self.there

    def cancel(self, ticket: Ticket, /) -> None:
        self.said.append(f"cancel {ticket.name}")

    def told(self) -> list[str]:
        said, self.said = self.said, []
        return said


def begun(tokens: int, **how: object) -> tuple[PythonSeam, Script, Stream]:
    seam, script = PythonSeam(BANKS), Script(**how)  # type: ignore[arg-type]
    stream = Stream(seam, script, script)  # type: ignore[arg-type]
    stream.weights = WEIGHTS
    stream.begin(BatchContext("prefill", tuple(range(tokens))))
    seam.begin()
    return seam, script, stream


def test_a_projection_is_waited_for_when_the_product_before_it_was_computed() -> None:
    seam, script, stream = begun(1)

    seam.handler(1, [1, 2])
    assert ["stage 1", "submit 1:012", "wait 1:012 0"] == script.told()
    assert WEIGHTS[1][0] == seam._awaited
    seam.advance()
    assert ["wait 1:012 1"] == script.told()
    assert WEIGHTS[1][1] == seam._awaited
    seam.advance()
    assert ["wait 1:012 2", "commit 1"] == script.told()

    assert 192 == stream.counters.read_bytes
    stream.settle()
    assert ["settle"] == script.told()


def test_no_product_is_isolated_when_all_reads_arrived_together() -> None:
    seam, script, _ = begun(1, there=True)

    seam.handler(1, [1, 2])

    assert ["stage 1", "submit 1:012", "wait 1:012 0", "wait 1:012 2", "commit 1"] == script.told()
    assert 0 == seam._awaited


def test_a_layer_of_a_prompt_is_read_while_the_one_before_it_is_computed() -> None:
    seam, script, stream = begun(MANY)
    assert seam.attentive

    seam.handler(0, [0, 1, 2, 3])
    assert ["stage 0", "submit 0:012", "ahead 1", "wait 0:012 0"] == script.told()
    seam.advance()
    assert ["submit 1:0", "wait 0:012 1"] == script.told()
    seam.advance()
    assert ["submit 1:1", "wait 0:012 2", "commit 0"] == script.told()
    assert WEIGHTS[0][2] == seam._awaited, "its slot is free only when the last product was computed too"
    seam.advance()
    assert ["submit 1:2"] == script.told()

    seam.handler(1, [0, 1, 2, 3])
    assert ["retire 0", "stage 1", "ahead 2", "wait 1:0 0", "wait 1:1 0", "wait 1:2 0"] == script.told()
    assert stream.counters.ahead_bytes == 192


def test_a_layer_that_was_all_hits_is_followed_by_reads_too() -> None:
    seam, script, _ = begun(MANY, resident={0})

    seam.handler(0, [0, 1, 2, 3])
    seam.advance()

    assert ["stage 0", "ahead 1", "submit 1:0"] == [said for said in script.told() if not said.startswith("commit")]


@pytest.mark.parametrize(
    ("tokens", "keys", "bank", "fits"),
    [
        (1, [0, 1, 2, 3], 0, True),
        (MANY, [0], 0, True),
        (MANY, [0, 1, 2, 3], LAYERS - 2, True),
        (MANY, [0, 1], 0, False),
    ],
    ids=["one token", "few experts", "before the last layer", "no room"],
)
def test_what_may_not_be_needed_is_not_read_ahead(tokens: int, keys: list[int], bank: int, fits: bool) -> None:
    seam, script, stream = begun(tokens, fits=fits)

    seam.handler(bank, keys)
    for _ in range(3):
        seam.advance()

    assert not [said for said in script.told() if said.startswith("ahead")]
    assert 0 == stream.counters.ahead_bytes


def test_a_product_that_nobody_awaited_is_an_error_and_leaves_nothing_out() -> None:
    seam, script, _ = begun(1)
    seam.handler(0, [1])
    script.told()

    with pytest.raises(NativeError, match="layer 0 was computed before it was read"):
        seam.handler(1, [1])

    assert ["cancel 0:012", "abandon"] == script.told()[:2]


def test_a_decode_that_ends_before_a_product_it_should_have_computed_is_an_error_and_is_settled() -> None:
    seam, script, stream = begun(1)
    seam.handler(0, [1])

    with pytest.raises(NativeError, match="layer 0 was computed before it was read"):
        stream.settle()

    assert "settle" == script.told()[-1]


def test_a_decode_that_is_stopped_cancels_what_is_out() -> None:
    seam, script, stream = begun(MANY)
    seam.handler(0, [0, 1, 2, 3])
    seam.advance()
    script.told()
    seam.stop()

    stream.settle()

    assert {"cancel 0:012", "cancel 1:0", "abandon"} <= set(script.told())
    assert 0 == seam._awaited


def test_another_layer_than_the_one_that_was_read_ahead_gives_it_up_before_staging() -> None:
    seam, script, _ = begun(MANY)
    seam.handler(0, [0, 1, 2, 3])
    for _ in range(3):
        seam.advance()
    script.told()

    seam.handler(2, [0, 1, 2, 3])

    said = script.told()
    assert said.index("abandon") < said.index("stage 2") < said.index("submit 2:012")
    assert {"cancel 1:0", "cancel 1:1", "cancel 1:2"} <= set(said[: said.index("stage 2")])


@pytest.mark.parametrize("fails", ["0:012 0", "0:012 1", "1:0 0"])
def test_a_read_that_fails_cancels_both_layers_and_nothing_is_valid(fails: str) -> None:
    seam, script, _ = begun(MANY, fails=fails)

    def prompt() -> None:
        seam.handler(0, [0, 1, 2, 3])
        for _ in range(3):
            seam.advance()
        seam.handler(1, [0, 1, 2, 3])

    with pytest.raises(ReadError):
        prompt()

    said = script.told()
    out = {name.removeprefix("submit ") for name in said if name.startswith("submit")}
    gone = {name.removeprefix("cancel ") for name in said if name.startswith("cancel")}
    assert gone >= {name for name in out if name.startswith("1") or fails.startswith("0")}
    assert "abandon" == said[-1]
