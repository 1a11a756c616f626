"""Long traces are read as short ones are, and whatever is wrong with one is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.layout import read_model
from bmoe.replay.read_lookups import read_lookups
from bmoe.replay.route_trace import DECODE, PREFILL, LayerBytes, Routed, RouteTrace, TraceError, read_trace, write_trace
from bmoe.testing.models import TinyModels
from bmoe_plugins.archs.table import bmoe_archs

EXCERPT = Path(__file__).parent / "gptoss-excerpt.route.csv"
HEAD = (
    "# route_trace v1\n# model=m.gguf arch=a n_layer=2 n_expert=4 n_expert_used=2\n"
    "# layer=0 expert_bytes=10 dense_bytes=0\n# layer=1 expert_bytes=20 dense_bytes=0\n"
    "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
)
ROW = "0,1,0,1,0,3,nan,0,20\n"


@pytest.fixture(name="said")
def _said(tmp_path):
    """What reading a text says; the file is named t.csv in it."""
    path = tmp_path / "t.csv"

    def read(data, **options):
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        with pytest.raises(TraceError) as caught:
            read_lookups(path, **options)
        assert 2 == caught.value.exit_code
        return str(caught.value).replace(str(path), "t.csv")

    return read


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("", "t.csv: line 1 begins with ''; a trace begins with '# route_trace v1'"),
        ("{}", "t.csv: line 1 begins with '{}'; a trace begins"),
        (b"\x00" * 9000, "t.csv: line 1 begins with"),
        (b"GGUF\x03\xff\xfe", "t.csv: cannot be read (no text); name a file of route_trace v1"),
        ("# route_trace v1\n", "t.csv: line 2 says no n_layer="),
        (HEAD.replace("n_layer=2", "n_layer=x") + ROW, "t.csv: line 2 says n_layer=x; it must be a whole number"),
        (HEAD.replace("n_layer=2", "n_layer=99999999") + ROW, "t.csv: line 2 says n_layer=99999999; it must be from 1"),
        (HEAD.replace("n_expert=4", "n_expert=0") + ROW, "t.csv: line 2 says n_expert=0; it must be from 1"),
        (HEAD.replace(",slot", "") + ROW, "t.csv: line 5 has no column 'slot'"),
        (HEAD, "t.csv: has no decode row (phase 1)"),
        (HEAD + ROW.replace("0,1", "0,0", 1), "t.csv: has no decode row (phase 1)"),
        (HEAD + ROW + "0,1,1,1", "t.csv: line 7 is no row: '0,1,1,1'; it needs 9 numbers"),
        (HEAD + ROW + "\n# said later\n0,1,x,1,0,3,nan,0,20\n", "t.csv: line 9 is no row: '0,1,x,1"),
        (HEAD + "0,1,0,1,0,1.5,nan,0,20\n", "t.csv: line 6 is no row: '0,1,0,1,0,1.5"),
        (HEAD + "0,1,99999999999,1,0,1,nan,0,20\n", "t.csv: line 6 is no row"),
        (HEAD + ROW + "0,1,0,7,0,3,nan,0,20\n", "t.csv: line 7 names expert 3 of layer 7; the model has 2 layers"),
        (HEAD + "\n" + ROW + "0,1,0,1,1,-1,nan,0,20\n", "t.csv: line 8 names expert -1 of layer 1"),
        (HEAD + ROW + "0,1,0,1,1,3,nan,0,20\n", "t.csv: names expert 3 of layer 1 twice for one token"),
        (HEAD.replace("bytes=20", "bytes=0") + ROW, "t.csv: its header says no expert_bytes of layer 1; give --model"),
        (HEAD.replace("bytes=20", f"bytes={10**30}") + ROW, f"t.csv: says expert_bytes={10**30} of layer 1"),
    ],
)
def test_what_is_no_trace_is_one_line(said, data, expected):
    found = said(data)

    assert found.startswith(expected)
    assert "\n" not in found


@pytest.mark.parametrize("name", ["missing.csv", ".", "a\0b"])
def test_what_cannot_be_opened_is_one_line(tmp_path, name):
    with pytest.raises(TraceError, match="cannot be read"):
        read_lookups(f"{tmp_path}/{name}")


def test_blank_lines_comments_further_columns_and_a_missing_last_newline_are_no_matter(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(HEAD + ROW)
    expected = read_lookups(path)
    path.write_text(HEAD.replace("turn", "host,turn") + "\n# more\n" + "7," + ROW.rstrip())

    assert expected.keys.tolist() == read_lookups(path).keys.tolist() == [1 << 24 | 3]
    assert 1 == expected.tokens


LAYERS = st.dictionaries(
    st.integers(0, 3), st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), min_size=1, max_size=4
)
TOKENS = st.lists(st.tuples(st.integers(0, 1), st.booleans(), LAYERS), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(TOKENS)
def test_a_long_trace_is_read_as_a_short_one(tmp_path_factory, tokens):
    rows = [
        Routed(turn, PREFILL if prompt else DECODE, step, layer, slot, expert, 0.5, 0, 0)
        for step, (turn, prompt, layers) in enumerate(tokens)
        for layer, experts in layers.items()
        for slot, expert in enumerate(experts)
    ]
    rows.append(Routed(0, DECODE, len(tokens), 0, 0, 0, 0.5, 0, 0))
    path = tmp_path_factory.mktemp("trace") / "t.csv"
    write_trace(path, RouteTrace("m", "a", 4, 8, 4, {n: LayerBytes(n + 1, 0) for n in range(4)}, rows))

    found, expected = list(read_lookups(path).touches()), list(read_trace(path).routings())

    assert [[row.layer << 24 | row.expert for row in group] for group in expected] == [each.keys for each in found]
    assert [group[0].phase == DECODE for group in expected] == [each.counted for each in found]
    assert [group[0].layer + 1 for group in expected] == [each.entry_bytes for each in found]
    steps = [group[0][:3] for group in expected]
    ends = [a != b for a, b in zip(steps, [*steps[1:], None], strict=True)]
    assert ends == [each.ends_token for each in found]
    assert len({row[::2][:2] for row in rows if row.phase == DECODE}) == read_lookups(path).tokens


def test_a_published_trace_has_its_sizes_and_its_cycle():
    trace = read_lookups(EXCERPT)

    assert (3, 2, 128) == (trace.tokens, trace.n_used, trace.n_expert)
    assert 36 * 2 * 13219200 == trace.cycle_bytes


def test_sizes_may_come_from_a_models_header(tmp_path):
    rows = {row.name: row for row in bmoe_archs()}
    model = read_model(str(TinyModels(tmp_path).path("tiny-qwen3moe")), rows)
    path = tmp_path / "t.csv"
    layer = model.banks[0].layer
    body = f"0,1,0,{layer},0,1,nan,0,0\n"
    head = HEAD.replace("expert_bytes=10", "expert_bytes=0")
    path.write_text(head + body)

    assert {bank.layer: bank.entry_bytes for bank in model.banks} == read_lookups(path, model).entry_bytes
    path.write_text(head.replace("n_layer=2", "n_layer=99") + "0,1,0,98,0,1,nan,0,0\n")
    with pytest.raises(TraceError, match="has no experts in layer 98"):
        read_lookups(path, model)
    path.write_text(head.replace("n_expert=4", "n_expert=500") + body)
    with pytest.raises(TraceError, match="is of a model with 500 experts a layer"):
        read_lookups(path, model)
