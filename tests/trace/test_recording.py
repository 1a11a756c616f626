"""What a trace holds is what the engine did, and a traced run is the run that it would have been."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

import bmoe
from bmoe.contracts import RunSummary
from bmoe.native.compiled import compiled_seam_missing
from bmoe.replay.route_trace import HIT, MISS, read_trace
from bmoe.routes import record_routes

from .conftest import PROMPT

SEAMS = ["python", pytest.param("c", marks=pytest.mark.skipif(bool(compiled_seam_missing()), reason="no compiler"))]
COUNTED = ("logits_sha256", "lookups", "hits", "evictions", "rereads", "bytes_read", "prefill_bytes", "stop")


def counted(summary: RunSummary) -> dict[str, object]:
    return {name: getattr(summary, name) for name in COUNTED}


def table(path: Path) -> list[dict[str, str]]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


@pytest.mark.parametrize("budget_mb", [0, 1, 64], ids=["off", "some", "all"])
@pytest.mark.parametrize("overlap", ["off", "projection"])
@pytest.mark.parametrize("seam", SEAMS)
def test_a_traced_run_is_the_untraced_one(run, traces, seam, overlap, budget_mb):
    settings = [f"cache.budget_mb={budget_mb}", f"stream.overlap={overlap}"]
    plain, ids, _ = run(*settings, seam=seam)
    traced, traced_ids, engine = run(*settings, *traces("route", "io", "compute"), seam=seam)

    assert (counted(traced), traced_ids) == (counted(plain), ids)
    assert plain.logits_sha256 is not None
    assert engine.seam.name == seam
    assert engine.record.traced


@pytest.mark.parametrize("like", ["tiny-glm4moe", "tiny-gpt-oss", "tiny-grovemoe"])
def test_so_it_is_with_other_routers_and_per_node(run, traces, like):
    plain, ids, _ = run("cache.budget_mb=1", like=like)
    traced, traced_ids, _ = run("cache.budget_mb=1", *traces("route", "io", "compute", detail="node"), like=like)

    assert (counted(traced), traced_ids) == (counted(plain), ids)


def test_so_it_is_while_guesses_are_read(run, traces, tmp_path):
    settings = ["cache.budget_mb=1.3", "prefetch.policy=temporal"]
    plain, ids, _ = run(*settings, tokens=40)
    traced, traced_ids, _ = run(*settings, *traces("route", "io", "compute"), tokens=40)

    assert (traced.logits_sha256, traced_ids) == (plain.logits_sha256, ids)
    assert traced.lookups == plain.lookups
    assert {row["ahead"] for row in table(tmp_path / "io.csv")} == {"0", "1"}


def test_a_run_without_a_trace_says_so(run):
    _, _, engine = run("trace.detail=node")

    assert not engine.record.traced
    assert engine.stream._watchers == ()
    assert not engine.seam.attentive


@pytest.mark.parametrize("budget_mb", [0, 1, 64], ids=["off", "some", "all"])
def test_routings_are_those_that_the_engine_counted(run, traces, tmp_path, budget_mb):
    summary, ids, engine = run(f"cache.budget_mb={budget_mb}", *traces("route"))
    trace = read_trace(tmp_path / "route.csv")
    decode = [row for row in trace.rows if row.phase == 1]

    assert (len(decode), sum(row.residency == HIT for row in decode)) == (summary.lookups, summary.hits)
    # one token each, after the prompt; the last token was never decoded
    assert [group[0].step for group in trace.routings(1)][::4] == list(range(len(PROMPT), len(PROMPT) + len(ids) - 1))
    assert {row.turn for row in trace.rows} == {0}
    entry = engine.facts.banks[0].entry_bytes
    assert all(row.expert_bytes == (entry if row.residency == MISS else 0) for row in decode)
    # in the last layer llama.cpp keeps only the token whose logits are asked for
    prompt = Counter(row.layer for row in trace.rows if row.phase == 0)
    assert prompt == {0: 16, 1: 16, 2: 16, 3: 2}
    assert {row.step for row in trace.rows if (row.phase, row.layer) == (0, 3)} == {len(PROMPT) - 1}
    distinct = {(row.layer, row.expert) for row in trace.rows if row.phase == 0}
    assert sum(row.expert_bytes for row in trace.rows if row.phase == 0) == entry * len(distinct)


def test_routings_are_those_of_the_other_recorder(models, tmp_path):
    """`record_routes` stands before the store, a trace reads the graph: they see the same."""
    profile = {"model": {"threads": 1, "ctx": 256, "ubatch": 16}, "cache": {"budget_mb": 1}}
    path = tmp_path / "route.csv"
    with bmoe.open(profile, str(models.path()), overrides=[f'trace.route="{path}"']) as engine:
        rows = record_routes(engine, PROMPT)

    seen = read_trace(path).rows
    assert [row[2:6] for row in seen] == [row[2:6] for row in rows]
    assert [row[7:] for row in seen] == [row[7:] for row in rows]


def test_turns_are_conversations_that_do_not_go_on(models, tmp_path):
    profile = {"model": {"threads": 1, "ctx": 256, "ubatch": 16}}
    path = tmp_path / "route.csv"
    with bmoe.open(profile, str(models.path()), overrides=[f'trace.route="{path}"']) as engine:
        one = engine.conversation()
        list(one.generate(PROMPT, 3))
        list(one.generate([5, 6], 3, append=True))
        list(engine.conversation().generate(PROMPT, 2))

    found = {(row.turn, row.step) for row in read_trace(path).rows}
    assert found == {*((0, step) for step in range(8 + 2 + 2 + 2)), *((1, step) for step in range(8 + 1))}


def test_a_row_per_read_with_its_bytes(run, traces, tmp_path):
    summary, _, engine = run("cache.budget_mb=1", *traces("io"))
    rows = table(tmp_path / "io.csv")

    assert sum(int(row["bytes"]) for row in rows if row["state"] == "0") == summary.bytes_read
    banks = {bank.layer: bank for bank in engine.facts.banks}
    for row in rows:
        projection = banks[int(row["layer"])].projections[int(row["projection"])]
        first = projection.offset + int(row["expert"]) * projection.stride
        last = first + int(row["experts"]) * projection.stride
        assert int(row["offset"]) <= first < last <= int(row["offset"]) + int(row["bytes"])
        assert (int(row["experts"]), row["ahead"], row["shard"], row["state"]) > (0, "", "", "")
        assert float(row["submit_s"]) <= float(row["arrived_s"])
    assert [int(row["batch"]) for row in rows if row["ahead"] == "0"] == sorted(int(row["batch"]) for row in rows)


def test_a_row_per_layer_with_its_times(run, traces, tmp_path):
    summary, _, _ = run("cache.budget_mb=1", *traces("compute"))
    rows = [row for row in table(tmp_path / "compute.csv") if row["phase"] == "1"]

    assert Counter(row["layer"] for row in rows) == dict.fromkeys(["-1", "0", "1", "2", "3"], 11)
    spent = {name: sum(float(row[name]) for row in rows) for name in ("compute_s", "wait_s", "manage_s")}
    assert spent["wait_s"] == pytest.approx(summary.io_wait_s, rel=0.01, abs=1e-4)
    assert all(value > 0 for value in spent.values())
    # nothing is counted twice, and little is left out
    assert 0.5 * summary.decode_s < sum(spent.values()) <= summary.decode_s * 1.01 + 1e-3


def test_a_row_per_node(run, traces, tmp_path):
    summary, _, engine = run("cache.budget_mb=1", *traces("compute", detail="node"))
    rows = table(tmp_path / "compute.csv")

    products = Counter((row["decode"], row["layer"]) for row in rows if row["op"] == "MUL_MAT_ID")
    assert products == {(str(decode), str(layer)): 3 for decode in range(12) for layer in range(4)}
    assert {row["wait_s"] for row in rows} == {""}
    assert sum(float(row["compute_s"]) for row in rows if row["phase"] == "1") < summary.decode_s
    assert [row["layer"] for row in rows if row["node"].startswith("result_")] != []
    assert {row["layer"] for row in rows if row["node"].startswith("result_")} == {"-1"}
    assert engine.seam.name == "python"


@pytest.mark.parametrize("like", ["tiny-qwen3moe", "tiny-glm4moe", "tiny-gpt-oss"])
def test_parquet_has_every_probability(run, traces, tmp_path, like):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    run("cache.budget_mb=1", *traces("route"), like=like)
    run("cache.budget_mb=1", f'trace.route="{tmp_path}/route.parquet"', like=like)
    from bmoe.trace.rows import read_parquet

    lines, table_ = read_trace(tmp_path / "route.csv"), read_parquet(str(tmp_path / "route.parquet"))
    assert str(table_.rows) == str(lines.rows)
    assert (table_.layers, table_.model, table_.n_used) == (lines.layers, lines.model, lines.n_used)
    found = parquet.read_table(tmp_path / "route.parquet").to_pylist()
    assert all((row["probs"] is not None) == (row["slot"] == 0) for row in found)
    groups = [found[at : at + table_.n_used] for at in range(0, len(found), table_.n_used)]
    for group in groups:
        probs = np.array(group[0]["probs"])
        assert probs.shape == (table_.n_expert,)
        if like != "tiny-glm4moe":  # there a bias is added before the choice
            best = np.argsort(-probs, kind="stable")[: table_.n_used].tolist()
            assert [row["expert"] for row in group] == best
    if like == "tiny-qwen3moe":
        assert all(abs(sum(group[0]["probs"]) - 1) < 1e-5 for group in groups)


def test_fewer_tokens_than_a_run_has_are_no_rows_of_a_token(models, tmp_path):
    """A decode that is cancelled leaves no rows: nothing of it is in the conversation."""
    path = tmp_path / "route.csv"
    profile = {"model": {"threads": 1, "ctx": 256, "ubatch": 16}}
    with bmoe.open(profile, str(models.path()), overrides=[f'trace.route="{path}"']) as engine:
        conversation = engine.conversation()
        for token in conversation.generate(PROMPT, 8):
            if token.record.index == 3:
                conversation.cancel()
        held = len(conversation.tokens)

    assert {row.step for row in read_trace(path).rows} == set(range(held))
