"""How ``bmoe doctor`` prints what was found, and its exit codes; the checks themselves are in tests/doctor."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bmoe.cli import doctor, main
from bmoe.doctor.findings import Check, note, ok, problem
from bmoe.doctor.report import CHECKS, GENERAL

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "doctor.md"
CELL = {"fetcher": "aio", "lanes": 8, "read_bytes": 65536, "bytes_per_s": 2_340_000_000}
FOUND = [
    (Check("packages", "?", lambda _: ok(""), ()), ok("python 3.10")),
    (Check("swap", "?", lambda _: ok(""), ()), note("full\x1b[2J", "empty it")),
    (
        Check("bandwidth", "?", lambda _: ok(""), ()),
        ok("fast", grid=[CELL, {**CELL, "lanes": 1, "read_bytes": 1 << 20}]),
    ),
]
BROKEN = (Check("place", "?", lambda _: ok(""), ()), problem("gone", "look for it"))


@pytest.fixture(name="run")
def _run(monkeypatch, capsys):
    def call(found, *arguments):
        monkeypatch.setattr(doctor, "examine", lambda sources: iter(found))
        code = main(["doctor", *arguments])
        return code, capsys.readouterr().out

    return call


def test_each_check_is_a_line_and_a_remedy_is_another(run):
    code, out = run(FOUND)

    assert 0 == code
    assert [
        "ok       packages   python 3.10",
        "note     swap       full\N{REPLACEMENT CHARACTER}[2J",
        "                    → empty it",
        "ok       bandwidth  fast",
        "",
        "fetcher  lanes  64 KiB, GB/s  1024 KiB, GB/s",
        "aio      8      2.34          -",
        "aio      1      -             2.34",
        "",
        "2 ok, 1 noted, 0 in the way: bmoe can run here",
    ] == out.splitlines()


def test_what_is_in_the_way_is_exit_code_1(run):
    code, out = run([*FOUND, BROKEN])

    assert 1 == code
    assert "2 ok, 1 noted, 1 in the way: bmoe cannot run like this" == out.splitlines()[-1]


def test_json_is_one_object(run):
    code, out = run([*FOUND, BROKEN], "--json", "--quick", "models")
    record = json.loads(out)

    assert (1, 1, "models", True, False) == (code, *(record[key] for key in ("schema", "path", "quick", "usable")))
    assert [("packages", "ok", None), ("swap", "note", "empty it")] == [
        (each["check"], each["verdict"], each["remedy"]) for each in record["checks"][:2]
    ]


def test_on_a_terminal_it_is_a_table(run, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    _, out = run(FOUND)

    assert "\x1b[2J" not in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert plain != out
    assert re.search(r"^verdict +check +measured", plain)
    assert re.search(r"^ +→ empty it", plain, re.MULTILINE)


def test_the_page_has_every_check_with_its_remedies_and_no_other():
    text = PAGE.read_text("utf-8")
    sections = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))

    assert [check.name for check in CHECKS] == list(sections)
    for check in CHECKS:
        listed = re.findall(r"^- (.+)$", sections[check.name], re.MULTILINE)
        assert list(check.remedies) == listed, check.name
        assert f"{check.question[0].upper()}{check.question[1:]}?" in sections[check.name]
    general = text.partition("## Any check")[2].partition("\n## ")[0]
    assert list(GENERAL) == re.findall(r"^- (.+)$", general, re.MULTILINE)
