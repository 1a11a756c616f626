"""A report tells the machine, the setting and the figures, and nothing of who measured them, or where."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.bench.anonymous import anonymous
from bmoe.bench.result import Failure, Result, Settings
from bmoe.bench.sides import Side
from bmoe.resolve import resolve
from bmoe.telemetry import describe_run, record_json
from tests.bench.trials import trial

SECRET = st.from_regex(r"zq[a-z]{5,9}", fullmatch=True)
FORMS = st.sampled_from([
    "{}", "/home/{}/models/m.gguf", "{}@{}", "Linux 6.1.0-{}", "0.1.0+{}", "C:\\Users\\{}", "~{}", "lru {}", "{} lru",
    "1.{}", "host {}: refused", "{}.local", "Xeon-{}/7", "\n{}\n", "\u202e{}",
])  # fmt: skip


@pytest.fixture(name="record", scope="module")
def _record() -> dict[str, Any]:
    """A real run record of a profile that says as much as one can."""
    plan = resolve("demo", overrides=["model.threads=1", "fetch.plugin=aio"])
    made = record_json(describe_run(plan, notices=["reads of /srv/a go through the page cache"]))
    made["profile"]["fetch"]["roots"] = ["/srv/a"]
    made["profile"]["cache"]["heat"] = "/srv/heat.json"
    made["profile"]["plugins"] = {"enable": ["acme"], "archs": ["/srv/rows.toml"], "allow_experimental": True}
    made["profile"]["prefetch"] = {"policy": "temporal", "options": {"own": "x"}}
    made["shape"] = {"n_layer": 10, "n_expert": 32, "file_bytes": 1000}
    return made


def leaves(value, at=()):
    """The places of all texts, and of the keys of all tables."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*at, key), True
            yield from leaves(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*at, index))
    elif isinstance(value, str):
        yield at, False


def planted(value, at, text, *, key):
    """A copy of ``value`` with ``text`` as the text, or as the key, at one place."""
    if not at:
        return text
    copy = dict(value) if isinstance(value, dict) else list(value)
    if key and len(at) == 1:
        copy[text] = copy.pop(at[0])
    else:
        copy[at[0]] = planted(value[at[0]], at[1:], text, key=key)
    return copy


class TestPlanted:
    @given(st.data(), SECRET, FORMS)
    @settings(max_examples=300)
    def test_no_text_and_no_key_of_a_record_shows(self, record, data, secret, form):
        # the name of a processor is its maker's text
        places = [(at, key) for at, key in leaves(record) if at != ("machine", "cpu") or key]
        at, key = data.draw(st.sampled_from(places))
        text = form.replace("{}", secret)
        run = planted(record, at, text, key=key)
        report = json.dumps(anonymous(Result([Side("one", "demo")], Settings(), [trial(0, 0, run=run)])))

        assert secret not in report

    @given(SECRET, FORMS)
    def test_nothing_that_names_a_side_shows(self, record, secret, form):
        text = form.replace("{}", secret).replace("\n", " ")
        side = Side(text, text, text, (text, f"model.path={text}"), (f"model.path={text}", f"cache.options.{secret}=1"))
        found = Result([side, side], Settings(), [trial(0, 0, run=record)], {1: Failure(0, text, text)})

        assert secret not in json.dumps(anonymous(found))


class TestKept:
    def report(self, record):
        sides = [Side("cache.budget_mb=6.4", "demo", varied=("cache.budget_mb=6.4",)), Side("two", "demo")]
        trials = [each for i in range(8) for each in (trial(0, i, run=record), trial(1, i, (0.05, 0.1), run=record))]
        return anonymous(Result(sides, Settings(), trials, complete=True))

    def test_what_a_reader_needs_is_there(self, record):
        found = self.report(record)
        first, second = found["sides"]

        assert (1, "bench_report", True) == (found["schema"], found["event"], found["complete"])
        assert {"system", "arch", "cpu", "cpus", "memory_bytes", "filesystem", "page_bytes"} == found["machine"].keys()
        assert record["versions"]["numpy"] == found["versions"]["numpy"]
        assert "faster" == second["against_baseline"]["verdict"]
        assert [0.1, 0.2] == found["trials"][0]["decode_s"]
        assert (["cache.budget_mb=6.4"], "A", "B") == (first["varied"], first["side"], second["side"])
        assert 6.4 == first["profile"]["cache"]["budget_mb"]
        assert "next-use" == first["resolved"]["cache"]["name"]
        assert ("aio", 8) == (first["resolved"]["fetch"]["name"], first["resolved"]["fetch"]["options"]["depth"])
        assert ("glm4moe", "bmoe-ref", 32) == tuple(first["model"][key] for key in ("arch", "bundled", "n_expert"))
        assert "temporal" == first["profile"]["prefetch"]["policy"]

    def test_what_was_removed_is_told(self, record):
        (first, _) = self.report(record)["sides"]

        assert "(removed)" == first["profile"]["model"]["path"]
        assert ["(removed)"] == first["profile"]["fetch"]["roots"]
        assert {} == first["profile"]["prefetch"]["options"]

    def test_a_bench_in_which_nothing_was_measured_has_a_report(self):
        assert anonymous(Result([Side("one", "demo")], Settings()))["machine"] is None
