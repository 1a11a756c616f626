"""``bmoe fit URL``: the whole command against a real server."""

from __future__ import annotations

import json

import pytest

from bmoe.cli import main
from bmoe.synth import write_model

pytest.importorskip("httpx", reason="needs httpx")
pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")


@pytest.fixture(name="server", scope="module")
def _server(tmp_path_factory, serve):
    folder = tmp_path_factory.mktemp("served")
    write_model(folder / "model.gguf", "tiny-qwen3moe")
    (folder / "dense.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    with serve(folder) as server:
        yield server


def test_the_answer_is_that_for_the_file(server, tmp_path, capsys):
    given = ["--set", "model.threads=1", "--set", "cache.budget_mb=1.5", "--drive", str(tmp_path), "--json"]
    assert 0 == main(["fit", server.url("plain/model.gguf?token=secret"), *given])
    out = capsys.readouterr().out
    there = json.loads(out)
    assert 0 == main(["fit", str(server.folder / "model.gguf"), *given])
    here = json.loads(capsys.readouterr().out)

    for key in ("name", "arch", "file_bytes", "expert_bytes", "hit_rate", "budget_bytes", "bytes_per_token"):
        assert here[key] == there[key]
    assert 0 < there["fetched_bytes"] < 1 << 20
    assert "secret" not in out
    assert [] == list(tmp_path.iterdir())


def test_a_file_without_experts_is_named_by_its_address(server, capsys):
    assert 1 == main(["fit", server.url("plain/dense.gguf")])
    err = capsys.readouterr().err

    assert err.startswith(f"bmoe: {server.url('plain/dense.gguf')}: ")
    assert 1 == len(err.splitlines())
