"""``bmoe inspect``: one screen that says what a file is, also of one that cannot be streamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bmoe
from bmoe.cli import main
from bmoe.layout import read_model
from bmoe.synth import SHAPES, write_model
from bmoe.testing.shards import split_model
from bmoe_plugins.archs.table import bmoe_archs

ROWS = {row.name: row for row in bmoe_archs()}


@pytest.fixture(name="inspect")
def _inspect(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["inspect", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "small.gguf", "tiny-glm4moe", quant="Q8_0")


def lines(out: str) -> dict[str, str]:
    """The first part of the screen, by label."""
    return {line[:23].strip(): line[23:].strip() for line in out.partition("\n\n")[0].splitlines()}


def test_one_screen_says_what_a_file_is(inspect: Any, model: Path) -> None:
    code, out, err = inspect(model)
    told, facts = lines(out), read_model(model, ROWS)

    assert (0, "") == (code, err)
    assert len(out.splitlines()) < 24, "more than a screen"
    assert "synthetic tiny-glm4moe (4 layers)" == told["model"]
    assert "glm4moe (sigmoid gating, selection bias, shared experts, dense lead, mtp)" == told["architecture"]
    assert "yes" == told["can be streamed"]
    assert "4, 3 of them with experts" == told["layers"]
    assert f"8 a layer, 2 used, {facts.banks[0].entry_bytes / 1024:.2f} KiB each" == told["experts"]
    assert told["next-token prediction"].startswith("1 layer after these, with experts of ")
    assert f"one token's experts {facts.cycle_bytes / 1024:.2f} KiB" in told["size"]
    assert f"experts {facts.expert_bytes / 1024:.2f} KiB" in told["size"]
    assert "context 2048 · embedding 128 · vocabulary 512" == told["dimensions"]
    assert told["chat template"].startswith("yes, ")
    assert "routed experts         12 Q8_0  " in out
    assert "others" not in out


def test_json_has_the_experts_of_every_layer(inspect: Any, model: Path) -> None:
    _, out, _ = inspect(model, "--json")
    told, facts = json.loads(out), read_model(model, ROWS)

    assert [1, 2, 3] == [bank["layer"] for bank in told["banks"]]
    assert {"ffn_gate_exps": "Q8_0", "ffn_up_exps": "Q8_0", "ffn_down_exps": "Q8_0"} == told["banks"][0]["projections"]
    assert (True, None, 1) == (told["streams"], told["reason"], told["n_nextn"])
    sizes = told["expert_bytes"], told["dense_bytes"], told["cycle_bytes"], told["file_bytes"]
    assert (facts.expert_bytes, facts.dense_bytes, facts.cycle_bytes, facts.file_bytes) == sizes
    assert sum(c["bytes"] for c in told["tensors"]) <= told["file_bytes"]
    assert sum(c["count"] for c in told["tensors"]) == len(facts.dense) + 12


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"glm4moe", b"glm9moe", "architecture 'glm9moe' has experts but no row is known for it, close to 'glm4moe'"),
        (b"_exps.weight", b"_exqs.weight", "a glm4moe model without routed experts (a dense model)"),
        (b"blk.2.ffn_down_exps", b"blk.2.ffn_dawn_exps", "expert tensor blk.2.ffn_down_exps.weight of architecture"),
    ],
    ids=["unknown architecture", "dense", "a tensor missing"],
)
def test_what_cannot_be_streamed_says_why(
    inspect: Any, model: Path, tmp_path: Path, old: bytes, new: bytes, reason: str
) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(model.read_bytes().replace(old, new))
    code, out, err = inspect(path)

    assert (0, "") == (code, err)
    assert lines(out)["can be streamed"].startswith(f"no: {reason}")
    _, out, _ = inspect(path, "--json")
    assert (False, True) == (json.loads(out)["streams"], json.loads(out)["reason"].startswith(reason))


def test_a_row_of_a_file_makes_it_streamable(inspect: Any, model: Path, tmp_path: Path) -> None:
    path, rows = tmp_path / "odd.gguf", tmp_path / "rows.toml"
    path.write_bytes(model.read_bytes().replace(b"glm4moe", b"glm9moe"))
    rows.write_text('[[arch]]\nname = "glm9moe"\nhas = ["dense_lead"]\n')
    _, out, _ = inspect(path, "--archs", rows)

    assert "yes" == lines(out)["can be streamed"]
    assert "glm9moe (softmax gating, selection bias, shared experts, dense lead, mtp)" == lines(out)["architecture"]


def test_shards_are_counted_and_measured(inspect: Any, model: Path, tmp_path: Path) -> None:
    paths = split_model(model, tmp_path, lambda name: 1 if "exps" in name else 2 if "blk" in name else 0, 3)
    _, out, _ = inspect(paths[0])

    assert lines(out)["shards"].startswith("3, of ")
    assert "yes" == lines(out)["can be streamed"]


def test_what_a_file_says_is_not_acted_on(inspect: Any, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(model.read_bytes().replace(b"synthetic tiny", b"\x1b[2J\nsynthetic"))
    _, out, _ = inspect(path)

    assert "\x1b" not in out
    assert lines(out)["model"].startswith("\ufffd[2J\ufffdsynthetic")


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"<!DOCTYPE html>"], ids=["none", "empty", "short", "html"])
def test_what_is_no_model_is_an_error_in_one_line(inspect: Any, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "no.gguf"
    if content is not None:
        path.write_bytes(content)
    code, out, err = inspect(path)

    assert (1, "", 1) == (code, out, err.count("\n"))
    assert err.startswith(f"bmoe: {path}: ")


@pytest.mark.slow
def test_sixty_gigabytes_are_inspected_and_opened_in_little_memory(tmp_path: Path) -> None:
    """Inspecting takes under 200 MB; opening reads the dense weights and little more."""
    shape = replace(SHAPES["gpt-oss-120b"], n_head=8, n_head_kv=2, n_vocab=4096)
    path = write_model(tmp_path / "sixty.gguf", shape, sparse=True)
    assert path.stat().st_size > 60e9
    program = (
        "import re, sys; from bmoe.cli import main; code = main(['inspect', sys.argv[1]]);"
        "print(code, int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) << 10)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    code, peak = map(int, done.stdout.splitlines()[-1].split())
    assert code == 0
    assert peak < 200e6
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    with bmoe.open({"model": {"threads": 1, "ctx": 64}, "cache": {"budget_mb": 0}}, str(path)) as engine:
        read = engine.model.report.read_bytes
        assert read is not None
        assert engine.facts.dense_bytes * 0.5 < read < engine.facts.dense_bytes * 1.1


def test_what_is_wrong_with_rows_or_a_plugin_is_told_by_its_option(inspect: Any, model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.toml"
    rows.write_text('[[arch]]\nname = "x"\ngatng = 1\n')
    code, _, err = inspect(model, "--archs", rows)
    assert (2, True) == (code, err.startswith(f"bmoe: {rows}: arch.0.gatng = 1 is not a key of "))
    code, _, err = inspect(model, "--enable", "nobody")
    assert (2, True) == (code, err.startswith('bmoe: --enable names "nobody", which is not installed'))
