"""Architectures that are refused because llama.cpp itself gives no text with them: it is made to try, and fails.

The day that one of these tests fails, llama.cpp has learnt it: take ``cannot`` out of its row, and its gate runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import bmoe
from bmoe.cli import main
from bmoe.contracts import ArchRow
from bmoe.errors import ModelError
from bmoe.inspection import inspect_model
from bmoe.registry import load_registry
from bmoe.testing.models import TinyModels

ROWS = {row.name: row for row in load_registry().archs}
REFUSED = [row for row in ROWS.values() if row.cannot]
OUTCOMES = {
    "dflash": ("no context", "dflash requires ctx_other to be set"),
    "llama-embed": ("every logit is zero", ""),
    "nomic-bert-moe": ("every logit is zero", ""),
}
"""What comes of the tiny model in plain llama.cpp, and what llama.cpp says of it."""


@pytest.fixture(scope="module", name="models")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


def test_the_exceptions_are_few_and_each_is_tried() -> None:
    assert {row.name for row in REFUSED} == OUTCOMES.keys()
    assert len(REFUSED) <= 5


@pytest.mark.parametrize("arch", OUTCOMES)
def test_llama_cpp_gives_no_logits(models: TinyModels, arch: str) -> None:
    outcome, words = OUTCOMES[arch]
    done = try_it(models.path(f"tiny-{arch}"))

    assert done.stdout.strip() == outcome
    assert words in done.stderr


def test_what_is_tried_in_this_way_gives_logits_otherwise(models: TinyModels) -> None:
    assert try_it(models.path("tiny-qwen3moe")).stdout.strip() == "logits"


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_its_file_is_refused_with_the_reason(models: TinyModels, row: ArchRow) -> None:
    path = models.path(f"tiny-{row.name}")

    said = f"architecture {row.name!r} {row.cannot}; take another model"
    with pytest.raises(ModelError, match=f"^{re.escape(f'{path}: {said}')}$"):
        bmoe.open({"model": {"path": str(path)}})
    assert inspect_model(path, ROWS).reason == said


def test_they_are_listed_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["gates", "dflash"])
    assert "bmoe: arch:dflash: cannot be tested, since no model of it can be run: it is a " in capsys.readouterr().err
    main(["archs"])
    lines = capsys.readouterr().out.splitlines()

    assert {line.split()[0] for line in lines if "cannot be run: it is" in line} == OUTCOMES.keys()
    assert lines[-1] == f"{len(ROWS)} architectures, {len(OUTCOMES)} of them cannot be run"


def try_it(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, __file__, str(path)]  # a process of its own: llama.cpp may end it
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def _outcome(path: str) -> str:
    import llama_cpp as c
    import numpy as np

    model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    if not model:
        return "no model"
    params = c.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 64
    params.n_threads = params.n_threads_batch = 1
    context = c.llama_init_from_model(model, params)
    if not context:
        return "no context"
    tokens = (c.llama_token * 4)(300, 301, 302, 303)
    if code := c.llama_decode(context, c.llama_batch_get_one(tokens, len(tokens))):
        return f"llama_decode returned {code}"
    logits = c.llama_get_logits_ith(context, -1)
    if not logits:
        return "no logits"
    n_vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    return "logits" if np.ctypeslib.as_array(logits, (n_vocab,)).any() else "every logit is zero"


if __name__ == "__main__":
    print(_outcome(sys.argv[1]))
