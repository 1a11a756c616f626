"""The page in a real browser: it draws, searches and sorts, without a network, and what a file says stays text."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bmoe.trace.page import write_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PUBLISHED = Path(__file__).parents[1] / "replay" / "gptoss-excerpt.route.csv"
EVIL = '<img src=x onerror="document.title=\'evil\'"></script><script>document.title="evil"</script>'

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and os.name == "posix", reason="needs Chromium (Debian: apt install chromium)"
)


@pytest.fixture(name="browser", scope="module")
def _browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    with api.sync_playwright() as playwright:
        # in a container Chromium cannot set up its own sandbox as root; what it opens here are files of these tests
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(name="opened")
def _opened(browser: Any) -> Iterator[Any]:
    """Open a file; whatever goes wrong on the page, or leaves it, fails the test."""
    wrong: list[str] = []
    pages: list[Any] = []

    def opened(path: Path, scheme: str = "light") -> Any:
        page = browser.new_page(viewport={"width": 1100, "height": 800}, color_scheme=scheme)
        pages.append(page)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith("file:") else None)
        page.goto(path.as_uri())
        page.wait_for_selector("main[data-ready=yes]", timeout=30_000)
        return page

    yield opened
    for page in pages:
        page.close()
    assert wrong == []


@pytest.fixture(name="everything")
def _everything(tmp_path: Path) -> Path:
    """A page of all four kinds."""
    io = "# io_trace v1\n# model=m.gguf arch=a direct=1\nbatch,ahead,layer,bank,projection,expert,experts,shard,offset,"
    io += "bytes,submit_s,arrived_s,waited_s,state\n"
    io += "".join(f"{i},{i % 2},{i % 3},0,0,3,1,0,4096,65536,{i}.0,{i}.5,0.5,0\n" for i in range(40))
    compute = "# compute_trace v1\n# model=m.gguf arch=a n_layer=2 detail=node\ndecode,phase,step,tokens,layer,node,op,"
    compute += "start_s,compute_s,wait_s,manage_s\n"
    compute += "".join(f"{i},1,{i},1,{i % 2},ffn_up-{i % 2},MUL_MAT,0.{i},0.00{i},,\n" for i in range(1, 9))
    token = {"event": "token", "decode_s": 0.02, "read_wait_s": 0.01, "manage_s": 0.002, "compute_s": 0.008}
    token |= {"lookups": 8, "hits": 5, "demand_bytes": 1 << 20, "text": EVIL}
    records = [{"event": "run", "model": EVIL, "notices": [EVIL]}, *({**token, "index": i} for i in range(50))]
    (tmp_path / "io.csv").write_text(io)
    (tmp_path / "compute.csv").write_text(compute)
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    files = [str(PUBLISHED), *(str(tmp_path / name) for name in ("io.csv", "compute.csv", "run.jsonl"))]
    write_page(files, str(tmp_path / "page.html"))
    return tmp_path / "page.html"


def expect_found(page: Any, said: str) -> None:
    """Wait until the search has said this; the page forbids `eval`, so playwright's own waiting for texts serves."""
    from playwright.sync_api import expect

    expect(page.locator("#found")).to_have_text(said, timeout=10_000)


def colors(page: Any, index: int) -> int:
    """How many colours a drawing has."""
    script = """(i) => { const c = document.querySelectorAll("canvas")[i], d = c.getContext("2d").getImageData(0, 0,
        c.width, c.height).data, s = new Set(); for (let k = 0; k < d.length; k += 4) if (d[k + 3]) s.add(d[k] * 65536
        + d[k + 1] * 256 + d[k + 2]); return s.size; }"""
    return int(page.evaluate(script, index))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn(opened, everything, scheme):
    page = opened(everything, scheme)
    count = page.locator("canvas").count()

    assert [page.locator("section").nth(i).get_attribute("data-kind") for i in range(4)] == [
        "route", "io", "compute", "run",
    ]  # fmt: skip
    assert count == 5 + 3 + 3 + 3
    assert [i for i in range(count) if colors(page, i) < 8] == []
    assert page.locator("canvas[data-drawn=yes]").count() == count
    light = page.evaluate("getComputedStyle(document.body).backgroundColor").strip("rgb()").split(",")
    assert (int(light[0]) > 128) == (scheme == "light")


def test_what_a_file_says_stays_text(opened, everything):
    page = opened(everything)

    assert "evil" not in page.title()
    assert page.locator("img").count() == 0
    assert page.locator("td", has_text="onerror").count() == 50


def test_figures_of_the_page_are_those_of_the_file(opened, tmp_path):
    page_file = tmp_path / "page.html"
    write_page([str(PUBLISHED)], str(page_file))
    rows = [line.split(",") for line in PUBLISHED.read_text().splitlines() if line[0].isdigit()]
    decode = [row for row in rows if row[1] == "1"]
    page = opened(page_file)
    cards = dict(
        page.locator(".card").evaluate_all("all => all.map(c => [c.children[1].innerText, c.children[0].innerText])")
    )

    rate = sum(row[7] == "1" for row in decode) / len(decode)
    assert cards["hit rate of decode"] == f"{100 * rate:.1f} %"
    assert cards["routed experts"] == f"{len(rows):,}"
    assert cards["tokens"] == str(len({(row[0], row[2]) for row in rows}))


def test_a_search_finds_an_expert_in_tables_and_maps(opened, tmp_path):
    write_page([str(PUBLISHED)], str(tmp_path / "page.html"))
    page = opened(tmp_path / "page.html")
    drawing = "document.querySelectorAll('canvas')[0].toDataURL()"
    before = page.evaluate(drawing)
    rows = [line.split(",") for line in PUBLISHED.read_text().splitlines() if line[0].isdigit()]
    layer, expert = rows[300][3], rows[300][5]
    uses = sum((row[3], row[5]) == (layer, expert) for row in rows)

    page.fill("#search", f"layer {layer} expert {expert}")
    expect_found(page, "1 rows found")
    assert page.locator("tbody tr").count() == 1
    assert page.locator("tbody td").all_inner_texts()[:3] == [layer, expert, str(uses)]
    assert page.evaluate(drawing) != before
    assert page.locator("select").nth(1).input_value() == layer

    page.fill("#search", "nothing of the kind")
    expect_found(page, "0 rows found")
    page.fill("#search", "")
    expect_found(page, "")
    assert page.evaluate("document.querySelectorAll('tbody tr').length") == 200


def test_a_click_sorts_and_the_pointer_tells(opened, tmp_path):
    write_page([str(PUBLISHED)], str(tmp_path / "page.html"))
    page = opened(tmp_path / "page.html")
    page.locator("th", has_text="uses").click()
    down = [int(text) for text in page.locator("tbody td:nth-child(3)").all_inner_texts()]
    page.locator("th", has_text="uses").press("Enter")
    up = [int(text) for text in page.locator("tbody td:nth-child(3)").all_inner_texts()]
    assert (down, up) == (sorted(down, reverse=True), sorted(up))
    assert down[0] > up[0]

    page.locator("canvas").nth(0).hover(position={"x": 200, "y": 100})
    said = page.locator("#tip").inner_text()
    assert said.startswith("layer ")
    assert "experts: " in said


def test_a_long_trace_stays_usable(opened, tmp_path):
    """100 000 tokens: drawn and searched in seconds."""
    path = tmp_path / "long.csv"
    with path.open("w") as file:
        file.write("# route_trace v1\n# model=m arch=a n_layer=4 n_expert=64 n_expert_used=2\n")
        file.write("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n")
        for step in range(100_000):
            for layer in range(4):
                expert = (step * 7 + layer * 13 + step // 900) % 63
                file.write(f"0,1,{step},{layer},0,{expert},nan,1,0\n0,1,{step},{layer},1,63,nan,0,10\n")
    write_page([str(path)], str(tmp_path / "page.html"))
    page = opened(tmp_path / "page.html")

    page.fill("#search", "expert 63")
    expect_found(page, "4 rows found")
    assert page.locator("tbody td").all_inner_texts()[:3] == ["0", "63", "100,000"]
