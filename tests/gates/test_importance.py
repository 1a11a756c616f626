"""The in-tree importance scorers pass their gate."""

from __future__ import annotations

import json

from bmoe.testing import ImportanceGates


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
