"""Routing traces: published ones load, ours round-trip, and what an engine records is what its router chose."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bmoe
from bmoe.contracts import key_parts
from bmoe.errors import NativeError
from bmoe.layout import read_model
from bmoe.native.evalhook import PythonSeam
from bmoe.native.model import Context, ContextOptions, Model
from bmoe.replay import most_hits, replay
from bmoe.replay.route_trace import HIT, LayerBytes, Routed, RouteTrace, TraceError, read_trace, trace_of, write_trace
from bmoe.replay.usage import layer_use
from bmoe.routes import record_routes
from bmoe.testing.models import TinyModels
from bmoe_plugins.archs.table import bmoe_archs
from bmoe_plugins.caches.lru import Lru

# From BigMoeOnEdge, Apache-2.0; the file's second line says what was left out.
PUBLISHED = Path(__file__).parent / "gptoss-excerpt.route.csv"
TOKENS = [(i * 37 + 11) % 512 for i in range(24)]


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(name="script", scope="module")
def _script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts/measure_routing.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the format


def test_a_published_trace_loads() -> None:
    trace = read_trace(PUBLISHED)

    assert (trace.model, trace.arch) == ("gpt-oss-120b-Q4_K_M.gguf", "gpt-oss")
    assert (trace.n_layer, trace.n_expert, trace.n_used) == (36, 128, 2)
    assert trace.layers[35] == LayerBytes(13219200, 23280128)
    assert trace.rows[0] == Routed(0, 0, 0, 0, 0, 83, 0.529533, 0, 13219200)
    assert [len(step) for step in trace.steps()] == [36, 36, 36]
    assert trace.steps()[0][0] == (0, tuple(row.expert for row in trace.rows if row[1:4] == (1, 85, 0)))
    # the last layer of a prompt is routed for its last token only, which is not among these
    assert len(list(trace.routings(phase=0))) == 3 * 35


def test_a_published_trace_replays() -> None:
    steps = read_trace(PUBLISHED).steps()

    assert replay(Lru(), steps, 36 * 128).hits == most_hits(steps, 36 * 128) > replay(Lru(), steps, 8).hits


def test_a_published_trace_is_written_as_it_was(tmp_path: Path) -> None:
    write_trace(tmp_path / "again.csv", read_trace(PUBLISHED))

    first, note, *rest = PUBLISHED.read_text().splitlines()
    assert "Apache-2.0" in note
    assert (tmp_path / "again.csv").read_text().splitlines() == [first, *rest]


SMALL = st.integers(0, 3)
ROWS = st.builds(
    Routed, SMALL, st.integers(0, 4), st.integers(-1, 5), st.integers(0, 2), SMALL, st.integers(0, 7),
    st.sampled_from([0.5, 0.123456, math.nan, 1e-05]), st.integers(0, 2), st.integers(0, 1 << 40),
    st.integers(-1, 9), SMALL,
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(ROWS, max_size=12), st.text("aZ9-._ ", min_size=1, max_size=9), st.booleans())
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Routed], name: str, drafts: bool
) -> None:
    rows = rows if drafts else [row._replace(round=-1, place=0) for row in rows]
    path = tmp_path_factory.getbasetemp() / "round.csv"
    layers = {0: LayerBytes(0, 7), 1: LayerBytes(5, 1), 2: LayerBytes(5, 0)}
    trace = RouteTrace(name, "umbra", 3, 8, 2, layers, rows, drafts)
    write_trace(path, trace)
    again = read_trace(path)

    assert str(again.rows) == str(rows)  # as text, since NaN is not equal to itself
    assert (again.model, again.arch, again.layers) == (name.replace(" ", "_"), "umbra", layers)
    assert (again.n_layer, again.n_expert, again.n_used, again.drafts) == (3, 8, 2, drafts)
    named = path.read_text().splitlines()[5].split(",")
    assert named == ["turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes"] + (
        ["round", "place"] if drafts else []
    )


def test_further_columns_are_passed_over_and_their_order_is_free(tmp_path: Path) -> None:
    path = tmp_path / "more.csv"
    path.write_text(
        "# route_trace v1\n# n_layer=2 n_expert=4 n_expert_used=1\n"
        "expert,dropped,turn,phase,step,layer,slot,weight,residency,expert_bytes\n3,1,0,1,9,1,0,0.5,2,8\n"
    )

    assert read_trace(path).rows == [Routed(0, 1, 9, 1, 0, 3, 0.5, 2, 8)]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("# route_trace v1", "# route_trace v2", "line 1 begins with '# route_trace v2'; a trace begins with"),
        ("n_expert=128 ", "", "line 2 says no n_expert=; it must be a whole number"),
        ("n_expert=128 ", "n_expert=many ", "line 2 says n_expert=many; it must be a whole number"),
        ("dense_bytes=23280128", "dense_bytes=-1", "line 4 says dense_bytes=-1"),
        (",residency,", ",resident,", "line 40 has no column 'residency'; the columns are turn,phase,step,"),
        ("0,0,0,0,1,30,0.470467,0,13219200", "0,0,0,0,1,x", "line 42 is no row: '0,0,0,0,1,x'; it needs 9 numbers"),
        ("0,0,0,0,1,30,", "0,0,0,0,1,128,", "line 42 names expert 128 of layer 0; the model has 36 layers with 128"),
        ("0,0,0,0,1,30,", "0,0,0,-1,1,30,", "line 42 names expert 30 of layer -1"),
    ],
)
def test_a_damaged_trace_says_where(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    text = PUBLISHED.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))

    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert f"{path}: {said}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x00\xff\xfe", b"# route_trace v1\n"])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "no.csv").write_bytes(data)

    with pytest.raises(TraceError, match=r"no\.csv: "):
        read_trace(tmp_path / "no.csv")


def test_a_place_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(tmp_path / "missing" / "t.csv", read_trace(PUBLISHED))
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "missing.csv")


# ---- what it says


def made(chosen: dict[tuple[int, int], tuple[int, ...]], n_expert: int = 4) -> RouteTrace:
    """A trace of one layer from (turn, step) → experts."""
    rows = [
        Routed(turn, 1, step, 0, slot, expert, math.nan, 0, 0)
        for (turn, step), experts in chosen.items()
        for slot, expert in enumerate(experts)
    ]
    return RouteTrace("m", "a", 1, n_expert, 2, {0: LayerBytes(1, 1)}, rows)


def test_use_and_overlap_by_hand() -> None:
    (use,) = layer_use(made({(0, 0): (0, 1), (0, 1): (1, 2), (0, 2): (2, 1), (1, 0): (1, 2), (1, 1): (0, 3)}))

    assert (use.counts, use.tokens, use.n_used) == ((2, 4, 3, 1), 5, 2)
    assert use.shares == (0.8, 1.6, 1.2, 0.4)
    # 1 and 2 in common within the first turn, 0 within the second; the turn's beginning is nobody's neighbour
    assert (use.overlap, use.pairs) == (3 / 3 / 2, 3)
    assert use.chance == 0.5
    assert use.usage_chance == pytest.approx((4 + 16 + 9 + 1) / 25 / 2)


def test_tokens_that_do_not_follow_each_other_are_no_pair() -> None:
    (use,) = layer_use(made({(0, 0): (0, 1), (0, 2): (0, 1), (0, -1): (0, 1)}))

    assert (use.overlap, use.pairs) == (None, 0)


def test_even_draws_overlap_as_chance_says() -> None:
    """Every pair of experts after every other: the overlap is exactly used / experts."""
    pairs = [(a, b) for a in range(4) for b in range(a)]
    chosen = {
        (turn, step): experts
        for turn, both in enumerate((p, q) for p in pairs for q in pairs)
        for step, experts in enumerate(both)
    }
    (use,) = layer_use(made(chosen))

    assert use.overlap == pytest.approx(use.chance) == pytest.approx(use.usage_chance) == 0.5


def test_use_of_a_published_trace_is_what_a_plain_count_gives() -> None:
    experts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for line in PUBLISHED.read_text().splitlines():
        if line[0] not in "#t":
            _, _, step, layer, _, expert, *_ = line.split(",")
            experts[int(layer), int(step)].add(int(expert))

    for use in layer_use(read_trace(PUBLISHED)):
        steps = [step for layer, step in experts if layer == use.layer]
        common = [
            len(experts[use.layer, s] & experts[use.layer, s - 1]) / 2 for s in steps if (use.layer, s - 1) in experts
        ]
        assert (use.pairs, use.tokens) == (len(common), len(steps))
        assert use.overlap == pytest.approx(sum(common) / len(common))
        assert sum(use.counts) == 2 * len(steps)


# ---- recording


def routed_plainly(path: Path) -> list[tuple[int, int, int, int]]:
    """(step, layer, slot, expert) of a model in memory, seen by an eval hook that reads nothing."""
    facts = read_model(path, {row.name: row for row in bmoe_archs()})
    seen: list[tuple[int, int, int, int]] = []
    seam, step = PythonSeam(facts.banks), 0

    def note(bank: int, keys: list[int]) -> None:
        seen.extend((step, key_parts(key).layer, slot, key_parts(key).expert) for slot, key in enumerate(keys))

    seam.handler = note
    model = Model(facts, keep_experts_out=False)
    with Context(model, ContextOptions(ctx=256, ubatch=16), callbacks=seam) as context:
        for token in TOKENS:
            seam.begin()
            assert context.decode([token]) == 0
            seam.finish()
            step += 1
    model.close()
    return seen


def profile(budget_mb: int, **more: Any) -> dict[str, Any]:
    return {"model": {"threads": 1, "ctx": 256, "ubatch": 16}, "cache": {"budget_mb": budget_mb}, **more}


@pytest.mark.parametrize("budget_mb", [0, 1, 64], ids=["off", "some", "all"])
@pytest.mark.parametrize("like", ["tiny-qwen3moe", "tiny-glm4moe"])
def test_recorded_routes_are_what_the_router_chose(models: TinyModels, like: str, budget_mb: int) -> None:
    """In router order, whatever the cache holds; residency and bytes are those that the engine counted."""
    path = models.path(like)
    with bmoe.open(profile(budget_mb), str(path)) as engine:
        rows = record_routes(engine, TOKENS, turn=3)
        assert engine.stream is not None
        counters = engine.stream.store.counters

    assert [(r.step, r.layer, r.slot, r.expert) for r in rows] == routed_plainly(path)
    assert {(r.turn, r.phase) for r in rows} == {(3, 1)}
    assert (len(rows), sum(r.residency == HIT for r in rows)) == (counters.lookups, counters.hits)
    sizes = {bank.layer: bank.entry_bytes for bank in engine.facts.banks}
    assert all(r.expert_bytes == (0 if r.residency == HIT else sizes[r.layer]) for r in rows)


def test_recording_changes_nothing_and_ends(models: TinyModels) -> None:
    with bmoe.open(profile(1), str(models.path())) as engine:
        store = engine.stream.store
        before = [t.id for t in engine.conversation().generate(TOKENS, 8)]
        rows = record_routes(engine, TOKENS)
        assert engine.stream.store is store
        assert [t.id for t in engine.conversation().generate(TOKENS, 8)] == before
        with pytest.raises(NativeError):
            record_routes(engine, [1 << 20])
        assert engine.stream.store is store
    assert len(rows) == len(TOKENS) * 4 * 2


def test_without_streaming_there_is_nothing_to_record(models: TinyModels) -> None:
    resident = {"model": {"threads": 1, "ctx": 64}, "stream": {"enabled": False}}
    with bmoe.open(resident, str(models.path())) as engine, pytest.raises(NativeError, match="nothing is streamed"):
        record_routes(engine, TOKENS)


def test_a_trace_of_a_model_describes_its_trunk(models: TinyModels) -> None:
    facts = read_model(models.path("tiny-glm4moe"), {row.name: row for row in bmoe_archs()})
    trace = trace_of(facts, [])

    assert (trace.n_layer, trace.n_expert, trace.n_used, sorted(trace.layers)) == (4, 8, 2, [0, 1, 2, 3])
    assert [trace.layers[i].expert_bytes for i in range(4)] == [0] + [3 * 96 * 128 // 32 * 34] * 3
    whole = sum(t.nbytes for t in facts.dense if t.name.startswith(("blk.0.", "blk.1.", "blk.2.", "blk.3.")))
    assert sum(size.dense_bytes for size in trace.layers.values()) == whole


# ---- the command


@pytest.fixture(name="text")
def _text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 2)
    return path


def test_the_command_writes_a_trace_and_says_what_is_in_it(
    script: ModuleType, models: TinyModels, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = text.with_name("trace.csv")
    arguments = [str(models.path("tiny-glm4moe")), str(text), "--out", str(out), "--threads", "1"]
    assert script.main([*arguments, "--ctx", "32", "--limit", "70", "--json"]) == 0

    said = json.loads(capsys.readouterr().out)["layers"]
    trace = read_trace(out)
    assert [(row["layer"], row["tokens"], row["pairs"]) for row in said] == [(i, 70, 67) for i in (1, 2, 3)]
    assert {row.turn for row in trace.rows} == {0, 1, 2}
    assert [row["overlap"] for row in said] == [use.overlap for use in layer_use(trace)]
    assert script.main([*arguments, "--limit", "8"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_lines_of_a_data_set_are_turns(
    script: ModuleType, models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "three"}\n')
    out = tmp_path / "trace.csv"
    assert script.main([str(models.path()), str(path), "--out", str(out), "--threads", "1"]) == 0

    assert [(r.turn, r.step) for r in read_trace(out).rows if (r.layer, r.slot) == (0, 0)] == [
        *((0, step) for step in range(3)),
        *((1, step) for step in range(5)),
    ]
    capsys.readouterr()


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    script: ModuleType, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = text.with_name("trace.csv")
    assert script.main(["no.gguf", str(text), "--out", str(out), "--plot", "usage.png"]) == 1

    assert capsys.readouterr().err == (
        "error: --plot needs matplotlib; install it (pip install matplotlib) or leave --plot out\n"
    )
    assert not out.exists()
