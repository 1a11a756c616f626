"""What a page says is what the file holds; a file that is none, or damaged, is one line."""

from __future__ import annotations

import base64
import json
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest

from bmoe.cli import main
from bmoe.replay.route_trace import TraceError, read_trace
from bmoe.trace.digest import digest
from bmoe.trace.page import render, write_page
from bmoe.trace.reading import load

PUBLISHED = Path(__file__).parents[1] / "replay" / "gptoss-excerpt.route.csv"
IO = (
    "# io_trace v1\n# model=m.gguf arch=a direct=1\n"
    "batch,ahead,layer,bank,projection,expert,experts,shard,offset,bytes,submit_s,arrived_s,waited_s,state\n"
)
COMPUTE = (
    "# compute_trace v1\n# model=m.gguf arch=a n_layer=2 detail=layer\n"
    "decode,phase,step,tokens,layer,node,op,start_s,compute_s,wait_s,manage_s\n"
)
ROUTE = (
    b"# route_trace v1\n# n_layer=1 n_expert=2 n_expert_used=1\n"
    b"turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
)


def embedded(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<u4")


def test_a_published_trace_is_summed_up_exactly():
    (section,) = digest(load(str(PUBLISHED)))
    rows = read_trace(PUBLISHED).rows

    assert (section["rows"], section["layers"], section["width"]) == (len(rows), list(range(36)), 1)
    cells, counts, misses = (unpacked(section[name]) for name in ("cell", "count", "miss"))
    tokens = sorted({(row.turn, row.step, row.phase) for row in rows})
    expected = {}
    for row in rows:
        cell = (row.layer * 128 + row.expert) * len(tokens) + tokens.index((row.turn, row.step, row.phase))
        count, miss = expected.get(cell, (0, 0))
        expected[cell] = count + 1, miss + (row.residency != 1)
    assert dict(zip(cells.tolist(), zip(counts.tolist(), misses.tolist(), strict=True), strict=True)) == expected
    assert sum(section["bytes"]) == sum(row.expert_bytes for row in rows)
    decode = [row.residency == 1 for row in rows if row.phase == 1]
    assert section["decode_hit_rate"] == sum(decode) / len(decode)


def test_a_long_trace_makes_a_small_page_soon(tmp_path):
    """100 000 tokens of 4 layers: read, summed up and written in seconds."""
    draw = random.Random(5)
    path = tmp_path / "long.csv"
    with path.open("w") as file:
        file.write("# route_trace v1\n# model=m arch=a n_layer=4 n_expert=64 n_expert_used=2\n")
        file.write("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n")
        for step in range(100_000):
            for layer in range(4):
                a = draw.randrange(64)
                file.write(f"0,1,{step},{layer},0,{a},nan,1,0\n0,1,{step},{layer},1,{63 - a},nan,0,10\n")
    began = time.monotonic()
    assert write_page([str(path)], str(tmp_path / "long.html")) == []
    took = time.monotonic() - began

    (section,) = embedded((tmp_path / "long.html").read_text())["sections"]
    assert (section["tokens"], section["bins"], section["width"]) == (100_000, 400, 250)
    assert int(unpacked(section["count"]).sum()) == 800_000
    assert section["decode_hit_rate"] == 0.5
    assert (tmp_path / "long.html").stat().st_size < 6 << 20
    assert took < 60


def test_reads_are_summed_up_by_hand(tmp_path):
    path = tmp_path / "io.csv"
    path.write_text(
        IO + "0,0,0,0,0,3,1,0,4096,1000,1.0,1.5,0.5,0\n"
        "1,1,1,0,2,4,1,0,8192,500,1.0,2.0,0.1,0\n2,1,1,0,2,5,1,0,8192,70,2.0,,0,1\n"
    )
    (section,) = digest(load(str(path)))

    assert (section["reads"], section["bytes"], section["ahead_bytes"]) == (3, 1500, 500)
    assert (section["cancelled"], section["failed"], section["span"]) == (1, 0, 1.0)
    assert (sum(section["demand"]), sum(section["read_ahead"]), sum(section["latency"])) == (1000, 500, 2)
    assert section["median_s"] == 0.75
    assert section["by_layer"] == [[0, 1, 1000.0, 0, 0.5, 1000.0], [1, 2, 500.0, 2, 1.0, 500.0]]


def test_compute_times_are_summed_up_by_hand(tmp_path):
    path = tmp_path / "c.csv"
    path.write_text(
        COMPUTE + "0,0,3,4,0,,,0.1,5,1,0\n1,1,4,1,-1,,,0.2,0.5,0,0\n1,1,4,1,0,,,0.3,1,2,3\n2,1,5,1,0,,,0.4,3,4,5\n"
    )
    (section,) = digest(load(str(path)))

    assert (section["decodes"], section["tokens"], section["layers"]) == (3, 2, [-1, 0])
    assert section["by_layer"] == {"compute_s": [0.25, 2.0], "wait_s": [0.0, 3.0], "manage_s": [0.0, 4.0]}
    assert section["series"] == {"compute_s": [5, 1.5, 3], "wait_s": [1, 2, 4], "manage_s": [0, 3, 5]}


def test_a_file_of_two_runs_is_two_sections(tmp_path):
    path = tmp_path / "runs.jsonl"
    token = {"event": "token", "schema": 1, "index": 0, "text": "a", "decode_s": 0.5, "hits": 1, "lookups": 2}
    run = {"event": "run", "schema": 1, "model": "/x/m.gguf", "traced": True}
    lines = [
        run,
        token,
        {"event": "summary", "tok_s": 2.0, "stop": "eog"},
        run,
        {**token, "decode_s": None},
        {"event": "other"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    one, two = digest(load(str(path)))

    assert (one["file"], one["model"], one["marks"]) == ("runs.jsonl, run 1", "m.gguf", ["traced"])
    assert (one["summary"]["tok_s"], one["series"]["decode_s"], two["series"]["decode_s"]) == (2.0, [0.5], [None])
    assert two["summary"] == {}


@pytest.mark.parametrize(
    "text",
    [
        PUBLISHED.read_text(),
        IO + "0,0,0,0,0,3,1,0,4096,1000,1.0,1.5,0.5,0\n" * 9,
        COMPUTE + "0,0,3,4,0,,,0.1,5,1,0\n" * 9,
        '{"event": "run"}\n' * 9,
    ],
    ids=["route", "io", "compute", "run"],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_cut_off_file_shows_what_is_whole(tmp_path, text, newline):
    path = tmp_path / "cut"
    path.write_bytes(text.replace("\n", newline).encode()[:-4])
    loaded = load(str(path))

    assert loaded.notices == [f"{path}: the last line is cut off and left out"]
    if loaded.kind == "run":
        assert len(loaded.records) == 8
    else:
        whole = [line for line in text.splitlines()[:-1] if line[0] in "0123456789"]
        assert len(loaded.columns["layer"]) == len(whole)
    assert digest(loaded)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty, which no trace does; name a "),
        (b"hello\n", "begins with 'hello', which no trace does; name a "),
        (b"\x00\xff\xfe", "which no trace does"),
        (b"PAR1 and no more", "is no routing trace in Parquet that was closed; record it again"),
        (b"{nonsense\n", "line 1 is no JSON: '{nonsense'"),
        (b'{"a": 1}\n', "has no record of a run; name a "),
        (b"# route_trace v1\n", "says no n_layer="),
        (b"# route_trace v2\n", "begins with '# route_trace v2', which no trace does"),
        (ROUTE + b"0,0,0,0,0,7,1,1,0\n", "line 4 names expert 7 of layer 0"),
        (ROUTE + b"0,0,x,0,0,1,1,1,0\n", "line 4 is no row: '0,0,x,0,0,1,1,1,0'"),
        (b"# io_trace v1\n", "line 2 has no column 'batch'"),
        (IO.encode() + b"1,2\n", "line 4 is no row: '1,2'; it needs 14 cells"),
        (IO.encode() + b"0,0,0,0,0,3,1,0,4096,many,1.0,1.5,0.5,0\n", "line 4 is no row: '0,0,0,0,0,3,1,0,4096,many"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_shown_is_one_line(tmp_path, capsys, data, said):
    if data.startswith(b"PAR1"):
        pytest.importorskip("pyarrow", reason="needs pyarrow")
    (tmp_path / "no.csv").write_bytes(data)
    assert main(["trace", "view", str(tmp_path / "no.csv"), "-o", str(tmp_path / "no.html")]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bmoe: {tmp_path}/no.csv: ")
    assert said in line
    assert not (tmp_path / "no.html").exists()


def test_a_trace_without_rows_makes_a_page(tmp_path):
    for name, text in (("io", IO), ("c", COMPUTE), ("r", "\n".join(PUBLISHED.read_text().splitlines()[:40]) + "\n")):
        (tmp_path / name).write_text(text)
        write_page([str(tmp_path / name)], str(tmp_path / "page.html"))


def test_a_page_replaces_a_page_and_nothing_else(tmp_path, capsys):
    page, book = tmp_path / "page.html", tmp_path / "book.html"
    book.write_text("<p>mine</p>")
    for _ in range(2):
        assert main(["trace", "view", str(PUBLISHED), "-o", str(page)]) == 0
    assert main(["trace", "view", str(PUBLISHED), "-o", str(book)]) == 2
    assert main(["trace", "view", str(PUBLISHED), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert main(["trace", "view", str(PUBLISHED), "-o", "/dev/full"]) == 2
    assert main(["trace", "view", str(tmp_path / "none"), "-o", str(page)]) == 2

    assert book.read_text() == "<p>mine</p>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.html", "page.html"]
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert "exists and is no page of bmoe, so it is not replaced" in errors[0]
    assert "none: cannot be read (No such file or directory)" in errors[3]


def test_nothing_in_a_file_becomes_part_of_the_page(tmp_path):
    evil = '</script><img src=x onerror="document.title=1">&"\'<!--'
    path = tmp_path / "evil.jsonl"
    lines = [{"event": "run", "model": evil, "notices": [evil]}, {"event": "token", "index": 0, "text": evil}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = render(digest(load(str(path))), [evil])

    assert evil not in page
    assert "<img" not in page
    assert embedded(page)["sections"][0]["text"] == [evil]
    assert embedded(page)["schema"] == 1
    assert re.findall(r"<[a-z]+ [^>]*(?:src|href)\s*=|url\(|@import|https?://", page) == []


def test_a_route_trace_in_parquet_is_shown_as_its_lines_are(tmp_path):
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    for name in ("a.csv", "a.parquet"):
        short = ["--profile", "demo", "--set", "model.threads=1", "-p", "Once", "-n", "4"]
        assert main(["trace", "route", *short, "-o", str(tmp_path / name)]) == 0
    (lines,), (table,) = (digest(load(str(tmp_path / name))) for name in ("a.csv", "a.parquet"))

    assert {**lines, "file": ""} == {**table, "file": ""}


def test_a_damaged_line_is_named_even_late_in_a_file(tmp_path):
    lines = PUBLISHED.read_text().splitlines()
    lines[300] = "0,1,86,3,0,abc,0.5,1,0"
    (tmp_path / "bad.csv").write_text("\n".join(lines) + "\n")

    with pytest.raises(TraceError, match=r"bad\.csv: line 301 is no row"):
        load(str(tmp_path / "bad.csv"))
