"""A model with enough experts that their memory is more than noise, and the account of a run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from bmoe.synth import SHAPES
from bmoe.testing.models import TinyModels

PROFILE = {"model": {"threads": 1, "ctx": 512, "ubatch": 128}}


@pytest.fixture(name="model", scope="session")
def _model(tmp_path_factory):
    """Four layers of 48 experts with 4.5 MiB each: 864 MiB, of which one token uses 36."""
    wide = replace(SHAPES["tiny-qwen3moe"], name="wide", n_expert=48, n_ff_exp=1536)
    return str(TinyModels(tmp_path_factory.mktemp("models")).path(wide, "F32", layers=4))


@pytest.fixture(name="account", scope="session")
def _account(model):
    def account(*overrides, prompt=8, tokens=60):
        program = f"""
import json
from bmoe.testing.account import measure
prompt = [(i * 37 + 11) % 512 for i in range({prompt})]
given = [(i * 53 + 7) % 512 for i in range({tokens})]
print(json.dumps(measure({model!r}, {PROFILE!r}, {list(overrides)!r}, prompt, given)))
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return account
