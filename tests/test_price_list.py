"""The price list is what the command writes from its results, and it has every plugin of the tree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bmoe.registry import load_registry

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "plugins"
LOSSLESS = {"cache", "prefetch"}


@pytest.fixture(scope="module")
def prices() -> dict[str, Any]:
    return json.loads((DOCS / "prices.json").read_text("utf-8"))


def pages(prices: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from shelf_pages import pages as made

    return made(prices)


def test_pages_are_what_the_command_writes(prices, monkeypatch):
    """After a change of options or a docstring: python benchmarks/shelf.py pages."""
    for name, text in pages(prices, monkeypatch).items():
        assert text == (DOCS / name).read_text("utf-8"), f"{name}: write the pages anew"


def test_nothing_else_is_there(prices, monkeypatch):
    made = {*pages(prices, monkeypatch), "prices.json", "pareto.svg"}

    assert made == {path.name for path in DOCS.iterdir()}


def test_every_plugin_has_a_page():
    rows = {(row.kind, row.name) for row in load_registry().rows if row.kind != "arch"}

    assert not [row for row in rows if not (DOCS / f"{row[0]}-{row[1]}.md").exists()]


def test_every_cache_policy_prefetcher_and_routing_policy_has_a_price(prices):
    priced = {(case["kind"], case["plugin"]) for case in prices["cases"].values()}
    rows = {(row.kind, row.name) for row in load_registry().rows if row.kind in {*LOSSLESS, "routing"}}

    assert rows - priced == {("cache", "none")}


def test_what_claims_to_be_lossless_was_measured_to_be(prices):
    for key, case in prices["cases"].items():
        if case["kind"] in LOSSLESS:
            for found in case["budgets"].values():
                # rows of logits were kept in float32 when they were measured
                assert found["perplexity_ratio"]["value"] == pytest.approx(1, abs=1e-6), key
                assert found["kl"]["value"] == pytest.approx(0, abs=1e-6), key


def test_a_loss_budget_was_held_by_every_token(prices):
    bounded = {key: case for key, case in prices["cases"].items() if "loss" in case["tables"]}
    for key, case in bounded.items():
        budget = case["tables"]["loss"]["budget"]
        assert all(found["worst_lost_mass"] <= budget + 1e-9 for found in case["budgets"].values()), key
    assert bounded


def test_half_the_bytes_cost_less_than_two_percent_of_perplexity(prices):
    """What the loss is for: the best setting on the reference model, against LRU with the same memory."""
    middle = f"{prices['settings']['middle_mb']:g}"
    base = prices["cases"]["cache:lru: default options"]["budgets"][middle]["mib_per_token"]["value"]
    found = [case["budgets"][middle] for case in prices["cases"].values() if case["lossy"] and not case["prompt"]]

    assert any(
        each["mib_per_token"]["value"] <= base / 2 and each["perplexity_ratio"]["high"] <= 1.02 for each in found
    )


@pytest.mark.slow
def test_it_measures_and_keeps_what_it_measured_before(tmp_path):
    file = tmp_path / "prices.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "shelf.py"), "measure", "--quick", "--rounds", "1"]
    for only in ("cache:lru", "k = 3, renorm"):
        done = subprocess.run(
            [*command, "--prices", str(file), "--only", only], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
    made = json.loads(file.read_text("utf-8"))
    lossless, lossy = (
        made["cases"]["cache:lru: default options"],
        made["cases"]["routing:top-k: k = 3, renormalise = false"],
    )
    for case in (lossless, lossy):
        assert {"3", "6.4", "10"} == set(case["budgets"])
        assert all(0 < found["hit_rate"]["value"] < 1 for found in case["budgets"].values())
    assert lossy["budgets"]["6.4"]["perplexity_ratio"]["value"] != 1
    assert 0 < lossy["budgets"]["6.4"]["lost_mass"] < 1
    assert lossy["speed"]["value"] > 0
    assert "speed" not in lossless
