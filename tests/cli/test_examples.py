"""Every example of a help text and of the reference runs as it is printed, in a folder that has the files it names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bmoe.cli import COMMANDS, main
from bmoe.layout import read_model
from bmoe.registry import load_registry
from bmoe.replay.route_trace import DECODE, Routed, trace_of, write_trace
from bmoe.synth import write_model
from bmoe.trace import compute, io

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
FENCE = re.compile(r"^```(?:sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HELP = [[], ["profile"], ["profile", "check"], ["profile", "show"], ["profile", "list"]]
HELP += [[name] for name in COMMANDS if name != "profile"]
HELP += [["trace", name] for name in ("route", "io", "compute", "view")]

LONG = {"bench", "doctor", "eval", "fit", "gates"}
"""Commands that measure or test for a while."""
MADE_UP = "acme_moe"
"""An architecture that stands for one of the reader's own; llama.cpp loads no model of it."""

ACME = """
from bmoe import hookimpl
from bmoe.contracts import Options, Provider
from bmoe_plugins.caches.lru import Lru
from bmoe_plugins.sinks import jsonl


class Window(Options):
    window: int = 4096


@hookimpl
def bmoe_caches():
    return [Provider("acme.hotset", lambda options, facts: Lru(), Window)]


@hookimpl
def bmoe_sinks():
    (own,) = jsonl.bmoe_sinks()
    return [Provider("acme.lines", own.build, own.options)]
"""


def of_reference() -> list[str]:
    bodies = [body for page in sorted(REFERENCE.glob("*.md")) for body in FENCE.findall(page.read_text("utf-8"))]
    lines = [line.removeprefix("$ ") for body in bodies for line in body.splitlines()]
    return [marked(line) for line in lines if line.startswith("bmoe ") and MADE_UP not in line]


def marked(line: str) -> object:
    """A line of the reference, or the words of a command: slow if it takes its time."""
    return pytest.param(line, marks=pytest.mark.slow if LONG & {*line.split()[1:2]} else (), id=line)


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    """What the examples take for granted: a model, profiles, data, an installed plugin, and bmoe on the path."""
    folder = tmp_path_factory.mktemp("examples")
    write_model(folder / "model.gguf", "tiny-qwen3moe", locality=0.6)
    shutil.copy(folder / "model.gguf", folder / "tiny.gguf")
    (folder / "my.toml").write_text('[model]\npath = "model.gguf"\nctx = 512\nthreads = 1\n[cache]\nbudget_mb = 2\n')
    shutil.copy(REFERENCE.parents[1] / "tests" / "replay" / "gptoss-excerpt.route.csv", folder / "trace.csv")
    shutil.copy(REFERENCE.parents[1] / "tests" / "replay" / "gptoss-excerpt.route.csv", folder / "demo.route.csv")
    for kind, columns in (("io", io.COLUMNS), ("compute", compute.COLUMNS)):
        (folder / f"demo.{kind}.csv").write_text(f"# {kind}_trace v1\n{','.join(columns)}\n")
    facts = read_model(str(folder / "model.gguf"), {row.name: row for row in load_registry().archs})
    routed = [
        Routed(0, DECODE, step, bank.layer, slot, (step + slot) % bank.n_expert, float("nan"), 0, bank.entry_bytes)
        for step in range(20)
        for bank in facts.banks
        for slot in range(bank.n_used)
    ]
    write_trace(folder / "mine.csv", trace_of(facts, routed))
    (folder / "prompt.txt").write_text("Once upon a time")
    (folder / "heldout.jsonl").write_text(json.dumps({"text": "a river"}) + "\n")
    (folder / "problems.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    site = folder / "site"
    info = site / "bmoe_acme-0.1.dist-info"
    info.mkdir(parents=True)
    (site / "acme.py").write_text(ACME)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bmoe-acme\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[bmoe.plugins]\nacme = acme\n")
    script = folder / "bin" / "bmoe"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bmoe.cli "$@"\n')
    script.chmod(0o755)
    return folder


@pytest.fixture(name="shell")
def _shell(folder):
    def call(line):
        paths = [str(folder / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env = {
            **os.environ,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        for left in [*folder.glob("*.replies.jsonl"), *(folder / name for name in made(line))]:
            left.unlink(missing_ok=True)
        return subprocess.run(
            line, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
        )

    return call


def made(line: str) -> list[str]:
    """The file that an example writes, which an earlier one may have left."""
    return re.findall(r"^bmoe synth (\S+)", line)


@pytest.mark.parametrize("command", [marked(" ".join(["bmoe", *command])) for command in HELP])
def test_the_example_of_a_help_text_runs(shell, capsys, command):
    main([*command.split()[1:], "--help"])
    found = re.search(r"^example:\n  (bmoe .*)$", capsys.readouterr().out, re.MULTILINE)
    assert found is not None

    done = shell(found[1])
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("line", of_reference())
def test_an_example_of_the_reference_runs(shell, line):
    done = shell(line)

    assert 0 == done.returncode, done.stdout + done.stderr
