"""The gate of architectures: subclass :class:`ArchGates`, name the architecture, and pytest proves byte-identity."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bmoe.budget import MIB, held_bytes, size_budget
from bmoe.contracts import CachePolicy, ExpertKey, Facts, ModelFacts, Options, Provider
from bmoe.conversation import Conversation
from bmoe.errors import ReadError
from bmoe.inspection import inspect_model
from bmoe.native import aio, capture, memory, uring
from bmoe.native.compiled import compiled_seam_missing
from bmoe.pages import region_bytes
from bmoe.plan import Plan
from bmoe.resolve import resolve
from bmoe.synth import SHAPES, Shape
from bmoe.synth.arguments import fitting_quants
from bmoe.testing.identity import Generation, RecordingEngine, References, difference
from bmoe.testing.load import IN_TREE
from bmoe.testing.models import TinyModels
from bmoe.testing.watch import Watch, within_reach

UBATCH = 16
PROMPTS = (1, 7, 40)
"""Tokens of the prompts: one, fewer than a ubatch, more than two of them."""
BUDGETS = ("off", "layer", "cycle", "half", "all-but-one", "all")
FETCHERS = ("pread-1", "pread-2", "pread-8", "aio", "uring")
KERNEL_READERS = {"aio": aio.missing, "uring": uring.missing}
SEAMS = ("c", "python")


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to run a model: none of them may change its logits."""

    budget: str = "half"
    fetcher: str = "pread-2"
    direct: bool = True
    seam: str = "auto"
    threads: int = 1
    overlap: str = "off"

    def __str__(self) -> str:
        kind = "direct" if self.direct else "buffered"
        overlap = () if self.overlap == "off" else (self.overlap,)
        return "-".join((self.budget, self.fetcher, kind, self.seam, *overlap))


EVERY_CELL = tuple(Cell(*parts) for parts in itertools.product(BUDGETS, FETCHERS, (True, False), SEAMS))
SOME_CELLS = (
    Cell("off", "pread-2", True, "c"),
    Cell("layer", "aio", True, "python"),
    Cell("cycle", "pread-8", False, "c"),
    Cell("half", "aio", True, "c"),
    Cell("half", "pread-1", False, "python"),
    Cell("all-but-one", "uring", True, "python"),
    Cell("all", "aio", False, "c"),
)
"""Each budget, reader, seam and kind of read at least once."""


@dataclass(slots=True)
class Bench:
    """Models and reference logits that gates of one test session share."""

    folder: Path
    references: References = field(default_factory=References)

    @property
    def models(self) -> TinyModels:
        """Synthetic models, written once."""
        return TinyModels(self.folder)


BENCH = pytest.StashKey[Bench]()


def session_bench(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Bench:
    """The bench of this test session."""
    stash = request.config.stash
    if BENCH not in stash:
        stash[BENCH] = Bench(factory.mktemp("tiny-models"))
    return stash[BENCH]


@pytest.mark.gate
class ArchGates:
    """Proves that an architecture streams with the logits of plain llama.cpp. A subclass sets class attributes.

    ``arch`` is the gguf's ``general.architecture``, ``plugin`` the entry point of group ``bmoe.plugins`` that provides
    its row (``"bmoe"`` for one of bmoe's own); a row from TOML files is found through ``rows``, their paths. Models
    have the shape ``shape``, one of :data:`bmoe.synth.SHAPES` by its name or another, by default the tiny one of this
    architecture. ``thorough`` runs every combination of budget, reader and seam; without it a few have to do.

    A class for an architecture without a tiny shape overrides ``model`` and, if its files come in several
    quantisations, ``quants``. Such a file has to be small, tens of megabytes, for it is opened over a hundred times;
    have few enough experts for a prompt of 40 tokens to use them all, or nothing is evicted that comes back; and not
    end a generation at its first token. Random weights will do.
    """

    plugin: ClassVar[str] = IN_TREE
    provider: ClassVar[str]
    arch: ClassVar[str]
    shape: ClassVar[str | Shape | None] = None
    thorough: ClassVar[bool] = True
    quants: ClassVar[Sequence[str] | None] = None
    rows: ClassVar[Sequence[str]] = ()

    # ---- what is run

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per quantisation that the model can have. Without a model there is one failure and no test."""
        if self.tiny() is None and not self._has_model():
            pytest.fail(_no_model(self.arch), pytrace=False)
        if "quant" in metafunc.fixturenames:
            metafunc.parametrize("quant", self.every_quant())
        if "cell" in metafunc.fixturenames:
            metafunc.parametrize("cell", self.cells(metafunc.function.__name__), ids=str)

    @pytest.fixture(name="bench")
    def _bench(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
        return session_bench(request, tmp_path_factory)

    def cells(self, test: str) -> Sequence[Cell]:
        """The ways to run the model in a test."""
        if test == "test_identity":
            return EVERY_CELL if self.thorough else SOME_CELLS
        budgets = ("off", "half", "all") if self.thorough else ("half",)
        if test == "test_identity_with_two_threads":
            return [Cell(budget, threads=2) for budget in budgets]
        if test == "test_identity_of_every_quantisation":
            return [Cell(budget, "aio" if not aio.missing() else "pread-2") for budget in budgets]
        if test == "test_identity_with_overlap":
            seams = SEAMS if self.thorough else ("c",)
            readers = ("aio", "uring", "pread-1", "pread-2") if self.thorough else ("aio",)
            parts = itertools.product(BUDGETS if self.thorough else ("off", "half"), readers, seams)
            return [Cell(*part, overlap="projection") for part in ((b, r, True, s) for b, r, s in parts)]
        if test == "test_a_read_that_fails_late_leaves_nothing_valid":
            return [Cell("off", overlap="projection"), Cell("half", seam="python", overlap="projection")]
        if self.thorough:
            return [Cell(budget, seam=seam) for budget in ("off", "layer", "half") for seam in SEAMS]
        return [Cell("off", seam="python"), Cell("half", seam="c")]

    def tiny(self) -> str | Shape | None:
        """The synthetic shape, or its name, if there is one."""
        fitting = (name for name, s in SHAPES.items() if s.arch == self.arch and name.startswith("tiny-"))
        return self.shape or next(fitting, None)

    def _has_model(self) -> bool:
        return type(self).model is not ArchGates.model

    def every_quant(self) -> Sequence[str | None]:
        """The quantisations to test; None is the model's own."""
        if self.quants is not None:
            return self.quants
        if self._has_model():
            return [None]
        if not self.thorough:
            return [None]
        tiny = self.tiny()
        shape = SHAPES.get(tiny) if isinstance(tiny, str) else tiny
        return [None] if shape is None else fitting_quants(shape)

    def model(self, bench: Bench, quant: str | None = None) -> Path:
        """A model of this architecture; of its own quantisation if none is named."""
        shape = self.tiny()
        if shape is None:
            pytest.fail(_no_model(self.arch))
        return bench.models.path(shape, quant)

    def table(self, path: Path, cell: Cell, ubatch: int = UBATCH) -> dict[str, Any]:
        """The profile of a cell, but for the budget, whose bytes depend on the model."""
        plugin, _, lanes = cell.fetcher.partition("-")
        return {
            "model": {"path": str(path), "threads": cell.threads, "ctx": 128, "ubatch": ubatch},
            "stream": {"overlap": cell.overlap},
            "cache": {"policy": "lru", "budget_mb": 0},
            "fetch": {"plugin": plugin, "lanes": int(lanes or 1), "direct": cell.direct},
            "plugins": {"enable": [] if self.plugin == IN_TREE else [self.plugin], "archs": list(self.rows)},
        }

    def plan(self, path: Path, cell: Cell) -> Plan:
        """The plan of a cell. A budget below one token's cycle gets a policy that can use it."""
        plan = resolve(self.table(path, cell))
        cache, amount = plan.cache, budget_bytes(cell.budget, plan.facts)
        if cell.budget == "layer":
            cache = replace(cache, name="newest", provider=Provider("newest", _newest))
        return replace(plan, cache=cache, budget=size_budget(amount, amount / MIB, plan.facts, memory.PAGE))

    @contextmanager
    def open(self, path: Path, cell: Cell) -> Iterator[tuple[RecordingEngine, Watch]]:
        """An engine whose plugins are watched and whose expert memory is poisoned."""
        missing = compiled_seam_missing() if cell.seam == "c" else KERNEL_READERS.get(cell.fetcher, str)()
        if missing:
            pytest.skip(missing)
        watch = Watch()
        engine = RecordingEngine(watch.over(self.plan(path, cell)), seam=cell.seam)
        with engine:
            watch.begin(engine)
            yield engine, watch

    def check(self, bench: Bench, cell: Cell, quant: str | None = None) -> None:
        """Generate from every prompt, from one again, and in a second conversation; compare, prove what was done."""
        path = self.model(bench, quant)
        with self.open(path, cell) as (engine, watch):
            prompts = make_prompts(engine.facts)
            references = bench.references.of(self.table(path, cell, engine.width), prompts)
            with engine.conversation() as one, engine.conversation() as two:
                for conversation, index in ((one, 0), (one, 1), (one, 2), (one, 1), (two, 0)):
                    compare(engine, conversation, prompts[index], references[index])
            prove(engine, watch, cell)

    # ---- the row

    def test_row_is_what_the_graph_multiplies(self, bench: Bench) -> None:
        """The row names every expert tensor of the graph, none else, in the graph's order: reads come in that order."""
        with self.open(self.model(bench), Cell()) as (engine, _):
            facts = engine.facts
            assert facts.arch == self.arch
            wanted = {t.name for t in facts.dense} | {p.tensor for bank in facts.banks for p in bank.projections}
            found = list(capture.capture(engine.model, wanted, engine.context_options()).routed_by)
        assert found == [p.tensor for bank in facts.banks for p in bank.projections]

    def test_row_says_what_the_file_has(self, bench: Bench) -> None:
        """What the file has beside routed experts is in the row; a synthetic model shows all that the row says."""
        row = self.plan(path := self.model(bench), Cell()).row
        shown = set(inspect_model(path, {row.name: row}).traits)
        assert shown <= set(row.has)
        assert self._has_model() or shown == set(row.has)

    def test_mapping_is_out_of_reach(self, bench: Bench) -> None:
        """What the model's own mapping had of experts is inaccessible: nothing can read them there by mistake."""
        with self.open(self.model(bench), Cell()) as (engine, _):
            reached = within_reach(engine.facts, engine.plan.banks)
            forbidden = engine.model.report.forbidden_bytes
        if reached is None:
            pytest.skip("this system does not list a process's mappings")
        assert reached == []
        assert forbidden > 0

    # ---- identity

    def test_identity(self, bench: Bench, cell: Cell) -> None:
        """Streamed logits equal plain llama.cpp's, byte for byte, whatever is cached and however it is read."""
        self.check(bench, cell)

    def test_identity_with_two_threads(self, bench: Bench, cell: Cell) -> None:
        """Likewise where llama.cpp computes in parallel."""
        self.check(bench, cell)

    def test_identity_with_overlap(self, bench: Bench, cell: Cell) -> None:
        """Likewise where a projection is computed while those after it are still being read."""
        self.check(bench, cell)

    def test_identity_of_every_quantisation(self, bench: Bench, quant: str | None, cell: Cell) -> None:
        """Likewise with experts of any type: strides that are no multiple of a page among them."""
        self.check(bench, cell, quant)

    @pytest.mark.parametrize("batch", [1, 3, 9])
    def test_a_failed_read_leaves_nothing_valid(self, bench: Bench, batch: int, cell: Cell) -> None:
        """An entry whose read failed is not used afterwards, and the session generates again as if new."""
        self.fail(bench, batch, 0, cell)

    @pytest.mark.parametrize(("batch", "stage"), [(1, 1), (6, -1)])
    def test_a_read_that_fails_late_leaves_nothing_valid(
        self, bench: Bench, batch: int, stage: int, cell: Cell
    ) -> None:
        """Likewise if the projections before it were there and one of them was computed."""
        self.fail(bench, batch, stage, cell)

    def fail(self, bench: Bench, batch: int, stage: int, cell: Cell) -> None:
        """Let the reads of a stage of the n-th batch fail in a generation, then generate twice more and compare."""
        path = self.model(bench)
        with self.open(path, cell) as (engine, watch):
            prompts = make_prompts(engine.facts)
            references = bench.references.of(self.table(path, cell, engine.width), prompts)
            with engine.conversation() as conversation:
                watch.fetcher.fail_in, watch.fetcher.fail_stage = batch, stage
                with pytest.raises(ReadError, match="the gate wanted it"):
                    engine.generate(conversation, prompts[2])
                for index in (2, 0):
                    compare(engine, conversation, prompts[index], references[index])


def _no_model(arch: str) -> str:
    return f"bmoe.synth has no tiny {arch!r}; override model() to give the gate a small file (see ArchGates)"


def budget_bytes(name: str, facts: ModelFacts) -> int:
    """Bytes of one of :data:`BUDGETS`: of a layer's or a token's experts, or of the pages of all."""
    pages = sum(region_bytes(bank, p) for bank in facts.banks for p in range(len(bank.projections)))
    cycle = size_budget(0, 0, facts, memory.PAGE).cycle_bytes
    return {
        "off": 0,
        "layer": max(min(b.n_used, b.n_expert) * held_bytes(b, memory.PAGE) for b in facts.banks),
        "cycle": cycle,
        "half": max(cycle, pages // 2),
        "all-but-one": pages - memory.PAGE,  # one page short, so that one entry never fits
        "all": sum(b.n_expert * held_bytes(b, memory.PAGE) for b in facts.banks),
    }[name]


def make_prompts(facts: ModelFacts) -> list[list[int]]:
    """Seeded token ids, one list per length of :data:`PROMPTS`."""
    draw = random.Random(1)
    return [[draw.randrange(facts.n_vocab) for _ in range(length)] for length in PROMPTS]


def compare(engine: RecordingEngine, conversation: Conversation, prompt: Sequence[int], expected: Generation) -> None:
    """Generate and hold every logits row against the reference."""
    assert len(expected.tokens) > 1, "the reference ends at once: give the gate a model that does not"
    told = difference(engine.generate(conversation, prompt), expected, len(prompt), engine.width)
    assert not told, f"prompt of {len(prompt)} tokens: {told}"
    assert engine.stream is not None
    store = engine.stream.store
    assert store.held_bytes <= store.budget_bytes, "the cache holds more than its budget"


def prove(engine: RecordingEngine, watch: Watch, cell: Cell) -> None:
    """The plugins were really exercised, and what was read is what was missing: an inert one would pass otherwise."""
    assert engine.stream is not None
    counters, read = engine.stream.store.counters, sum(watch.fetcher.read.values())
    assert watch.fetcher.batches > 0, "the fetcher was never asked"
    assert cell.seam in ("auto", engine.seam.name)
    assert watch.fetcher.direct or not cell.direct or watch.fetcher.note, "not direct, and nobody says why"
    assert not (watch.fetcher.direct and not cell.direct), "direct although buffered reads were asked for"
    assert counters.lookups - counters.hits <= read, f"{read} entries were read for {counters} "
    assert cell.overlap != "off" or counters.lookups - counters.hits == read, "something was read for nothing"
    least, most = watch.fetcher.bounds()
    assert least <= watch.fetcher.nbytes <= most, "the bytes that arrived are not those of the entries that missed"
    assert engine.stream.counters.read_bytes == watch.fetcher.nbytes
    overlapped = engine.stream.counters.overlapped
    assert cell.overlap != "off" or not overlapped, "reads overlapped although they were not to"
    layers = {bank.layer for bank in engine.facts.banks}  # the last of them is computed for one token
    if cell.overlap != "off" and cell.budget in ("off", "all") and len(layers) > 2:
        assert engine.stream.counters.ahead_bytes > 0, "no layer of a prompt was read ahead"
        assert overlapped > 0, "reads did not overlap as they were to"
    if cell.budget == "off":
        assert counters.hits == 0
        assert watch.policy is None
        return
    policy = watch.policy
    assert policy is not None, "the policy was never asked: nothing is cached"
    assert sum(policy.touched.values()) == counters.lookups, "the policy does not see every use"
    assert policy.admitted == watch.fetcher.read
    if cell.budget == "all":
        assert (counters.evictions, counters.rereads) == (0, 0)
        assert set(watch.fetcher.read.values()) == {1}, "with room for everything, something was read twice"
    else:
        assert counters.evictions > 0, "nothing was evicted: give the gate a model whose prompts use every expert"
        assert counters.rereads > 0, "no evicted entry came back"
        assert policy.victims >= counters.evictions or cell.overlap != "off"
        assert counters.evictions == policy.forgotten
    if cell.budget in ("half", "all-but-one", "all"):
        assert counters.hits > 0, "nothing was ever found in the cache"


class _Newest:
    """Gives up what came last, so that some entries stay however small the budget."""

    below_cycle = True

    def __init__(self) -> None:
        self._resident: dict[ExpertKey, None] = {}

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        """Use does not count."""

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        self._resident[key] = None

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        return next((key for key in reversed(self._resident) if key not in pinned), None)

    def forget(self, key: ExpertKey, /) -> None:
        self._resident.pop(key, None)


def _newest(options: Options, facts: Facts) -> CachePolicy:
    return _Newest()
