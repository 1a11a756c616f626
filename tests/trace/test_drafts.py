"""The ledger of drafts: records add up to the summary, and traces of the same run say the same, round by round."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

import bmoe
from bmoe.replay.contender import Contender
from bmoe.replay.read_lookups import read_lookups
from bmoe.replay.route_trace import ACCEPTED, DECODE, GUESS, PREFILL, REJECTED, read_trace
from bmoe.telemetry import record_json
from bmoe.trace.digest import digest
from bmoe.trace.reading import load
from bmoe.trace.rounds import acceptance, of_records

from .conftest import PROMPT
from .test_recording import table

PROFILE = {"model": {"threads": 1, "ctx": 256, "ubatch": 16}, "fetch": {"plugin": "pread"}}
TOKENS = 24
SHARED = [HealthCheck.function_scoped_fixture]


@pytest.fixture(name="text", scope="session")
def _text(models):
    """What the model says, so that an oracle may know it."""
    with bmoe.open(PROFILE, str(models.path(quant="F32"))) as engine:
        return [*PROMPT, *(token.id for token in engine.conversation().generate(PROMPT, TOKENS))]


@pytest.fixture(name="drafted")
def _drafted(models, text):
    """Generate with an oracle; the summary and the records."""

    def drafted(*overrides, right=0.7, branching=1, most=4, seed=0, budget_mb=12, drafter="oracle", tokens=TOKENS):
        given = [f"draft.drafter={drafter}", f"draft.max_draft={most}", "draft.governor=fixed"]
        if drafter == "oracle":
            options = {"text": text, "acceptance": right, "branching": branching, "seed": seed}
            given += [f"draft.options.{name}={value}" for name, value in options.items()]
        given.append(f"cache.budget_mb={budget_mb}")
        with bmoe.open(PROFILE, str(models.path(quant="F32")), overrides=[*given, *overrides]) as engine:
            conversation = engine.conversation()
            records = [token.record for token in conversation.generate(PROMPT, tokens)]
        assert [record.token_id for record in records] == text[len(PROMPT) :][:tokens]
        return conversation.summary, records

    return drafted


def traced(folder: Path, *kinds, form="csv"):
    return [f'trace.{kind}="{folder / kind}.{form}"' for kind in kinds]


def added(records, name):
    return sum(getattr(record, name) or 0 for record in records)


@settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=SHARED)
@given(
    st.sampled_from([0.0, 0.5, 0.8, 1.0]), st.integers(1, 3), st.integers(1, 9), st.integers(0, 99),
    st.sampled_from([0, 12, 64]), st.integers(1, TOKENS),
)  # fmt: skip
def test_records_add_up_to_the_summary(drafted, right, branching, most, seed, budget_mb, tokens):
    summary, records = drafted(
        right=right, branching=branching, most=most, seed=seed, budget_mb=budget_mb, tokens=tokens
    )
    decoded = records[1:]
    rounds = [record for record in decoded if record.drafted]
    plain = [record for record in decoded if not record.drafted and record.decode_s]

    for name in ("drafted", "accepted", "draft_bytes", "rejected_bytes", "lookups", "hits", "evictions", "rereads"):
        assert getattr(summary, name) == added(decoded, name), name
    assert added(rounds, "draft_s") <= summary.draft_s
    assert summary.decode_s == pytest.approx(added(decoded, "decode_s"))
    assert sum(record.accepted + 1 for record in rounds) + len(plain) == len(decoded) == summary.tokens - 1
    assert all(record.rejected_bytes <= record.demand_bytes for record in rounds)
    assert all(record.demanded >= record.lookups >= record.hits for record in rounds)
    assert all(record.drafted >= record.accepted for record in rounds)
    if decoded:
        read = added(decoded, "demand_bytes") + added(decoded, "draft_bytes")
        assert summary.bytes_per_output_token == pytest.approx(read / len(decoded))
    if rounds:
        assert summary.accepted_length == pytest.approx(1 + summary.accepted / len(rounds))
    if branching == 1:
        depths = [record.drafted for record in rounds]
        rates = acceptance([record.accepted for record in rounds], depths)
        assert [rate for rate in summary.acceptance if rate is not None] == pytest.approx(rates)


@pytest.mark.parametrize("branching", [1, 2])
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_route_trace_has_every_token_of_a_round(drafted, tmp_path, form, branching):
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow")
    summary, records = drafted(*traced(tmp_path, "route", form=form), branching=branching)
    path = tmp_path / f"route.{form}"
    loaded = load(str(path))
    rows = read_trace(path).rows if form == "csv" else []
    rounds = [record for record in records[1:] if record.drafted]

    if rows:
        batches = defaultdict(list)
        for row in rows:
            batches[row.round].append(row)
        outside = batches.pop(-1)
        assert {row.phase for row in outside} <= {PREFILL, DECODE}
        for number, record in enumerate(rounds):
            batch = batches.pop(number)
            assert len({(row.layer, row.expert) for row in batch}) == record.lookups
            places = {row.place: row.phase for row in batch}
            assert sorted(places) == list(range(record.drafted + 1))
            assert places[0] == ACCEPTED
            assert sum(phase == ACCEPTED for phase in places.values()) == record.accepted + 1
            kept = {(row.layer, row.expert) for row in batch if row.phase == ACCEPTED}
            lost = sum(row.expert_bytes for row in batch if (row.layer, row.expert) not in kept)
            assert lost == record.rejected_bytes
        assert batches == {}
        text = [row.step for row in rows if row.phase in (DECODE, ACCEPTED) and (row.layer, row.slot) == (0, 0)]
        assert sorted(text) == list(range(len(PROMPT), len(PROMPT) + len(records) - 1))
        assert {row.phase for row in rows} == {PREFILL, DECODE, ACCEPTED, REJECTED} or DECODE not in text
    # the page says the same from either side
    (section,) = digest(loaded)
    seen, told = section["drafts"], of_records([record_json(record) for record in records], record_json(summary))
    assert seen["series"]["live"] == told["series"]["live"]
    for name in ("rounds", "drafted", "accepted", "length", "rejected_bytes"):
        assert seen[name] == told[name], name
    assert seen["acceptance"] == pytest.approx(told["acceptance"])
    assert section["tokens"] == len(PROMPT) + len(records) - 1


@pytest.mark.parametrize("budget_mb", [12.25, 64])
def test_a_trace_with_drafts_replays_as_the_engine_ran(drafted, tmp_path, budget_mb):
    plain = ("cache.policy=lru", "stream.overlap=off")  # else a prompt reads a whole layer, as no row of a trace says
    summary, records = drafted(*traced(tmp_path, "route"), *plain, budget_mb=budget_mb)
    trace = read_lookups(tmp_path / "route.csv")
    played = Contender("lru", "lru").play(trace, int(budget_mb * 2**20))
    assert (played.lookups, trace.tokens) == (summary.lookups, len(records) - 1)
    assert trace.drafts.batches == sum(1 for record in records[1:] if record.drafted)
    assert played.hits == summary.hits  # the smaller has 16 of 32 experts, in whole pages too


def test_guesses_are_rows_of_the_round_that_they_are_for(drafted, tmp_path):
    _, records = drafted(*traced(tmp_path, "route", "io", "compute"), drafter="self", most=3)
    rows = read_trace(tmp_path / "route.csv").rows
    order = [(row.round, row.phase == GUESS) for row in rows if row.round >= 0]

    assert {row.phase for row in rows} == {PREFILL, ACCEPTED, GUESS} | {row.phase for row in rows} & {DECODE, REJECTED}
    assert order == sorted(order, key=lambda item: (item[0], not item[1]))
    guessed = {row.round for row in rows if row.phase == GUESS}
    assert {row.round for row in rows if row.phase == ACCEPTED} <= guessed
    read = defaultdict(int)
    for row in table(tmp_path / "io.csv"):
        read[row["phase"]] += int(row["bytes"]) * (row["state"] == "0")
    rounds = [record for record in records[1:] if record.drafted]
    assert read["0"] == records[0].demand_bytes
    assert read["2"] == added(rounds, "demand_bytes")
    assert read["4"] == added(records, "draft_bytes")
    phases = {row["phase"] for row in table(tmp_path / "compute.csv")}
    assert {"0", "2", "4"} <= phases <= {"0", "1", "2", "4"}


def test_a_run_without_a_drafter_has_no_columns_of_drafts(run, traces, tmp_path):
    run(*traces("route", "io"))

    assert not read_trace(tmp_path / "route.csv").drafts
    assert read_lookups(tmp_path / "route.csv").drafts is None
    assert digest(load(str(tmp_path / "route.csv")))[0]["drafts"] is None
    assert {row["phase"] for row in table(tmp_path / "io.csv")} == {"0", "1"}
