"""The script that provides llama-cpp-python: a wheel is reused only where it fits, and a failed build leaves none."""

from __future__ import annotations

import importlib.util
import sys
import threading
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


@pytest.fixture(name="script")
def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama_wheel", ROOT / "scripts/llama_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="pip")
def _pip(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Replace the Python that would run pip by a shell script; returns how to set its body."""
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    monkeypatch.setattr(script, "installed_version", lambda: None)
    monkeypatch.setattr(script.shutil, "which", lambda name: f"/usr/bin/{name}")

    def set_body(body: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setattr(script.sys, "executable", str(path))

    return set_body


def test_range_is_that_of_the_project(script: ModuleType):
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]

    assert f"{script.PACKAGE}>={script.VERSION},<{script.BELOW}" in dependencies


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.3.36", True), ("0.3.40", True), ("0.3.36.post1", True), ("0.3.9", False), ("0.4.0", False), ("1.0", False)],
)
def test_installed_version_must_be_in_range(script: ModuleType, version: str, fits: bool):
    assert script.in_range(version) is fits


def test_installed_version_in_range_builds_nothing(script: ModuleType, pip, monkeypatch, tmp_path: Path, capsys):
    pip("exit 9")
    monkeypatch.setattr(script, "installed_version", lambda: "0.3.37")

    assert script.main(["--cache", str(tmp_path / "cache")]) == 0
    assert "0.3.37 is installed; nothing to build" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


def test_key_tells_cpu_portable_and_flags_apart(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    keys = {script.cache_key({}, portable=True), script.cache_key({"CMAKE_ARGS": "-DGGML_BLAS=ON"}, portable=False)}
    for flags in ("avx2 fma", "avx2 avx512f fma"):
        monkeypatch.setattr(script, "cpu_flags", lambda flags=flags: flags)
        keys.add(script.cache_key({}, portable=False))

    assert len(keys) == 4
    assert all(key.startswith(f"{script.VERSION}-{sys.implementation.name}") for key in keys)


def test_cpu_flags_do_not_depend_on_their_order(script: ModuleType, tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("model name : x\nflags\t\t: fma avx2\n\nflags\t\t: avx2 fma\n")
    two.write_text("Features\t: avx2 fma\n")

    assert script.cpu_flags(one) == script.cpu_flags(two)


def test_kept_wheel_is_used_without_a_build(script: ModuleType, pip, tmp_path: Path, capsys):
    pip("exit 9")
    home = tmp_path / script.cache_key({}, portable=True)
    home.mkdir()
    (home / "llama_cpp_python-0-py3-none-any.whl").write_bytes(b"kept")

    assert script.main(["--cache", str(tmp_path), "--portable", "--wheel-only"]) == 0
    assert "compiling" not in capsys.readouterr().out


def test_build_says_what_it_does_and_keeps_the_wheel(script: ModuleType, pip, monkeypatch, tmp_path: Path, capsys):
    """The fake pip finds the wheel folder in its arguments, and the lean build and portable flag in its environment."""
    made = tmp_path / "made.zip"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("llama_cpp/__init__.py", "")
    monkeypatch.setenv("CMAKE_ARGS", "-DMINE=1")
    pip(
        f'echo "$CMAKE_ARGS" > {tmp_path}/args\n'
        'while [ "$1" != --wheel-dir ]; do shift; done\n'
        f'cp {made} "$2/llama_cpp_python-0-py3-none-any.whl"'
    )

    assert script.main(["--cache", str(tmp_path / "cache"), "--portable", "--wheel-only"]) == 0
    out = capsys.readouterr().out
    assert "compiling llama-cpp-python" in out
    assert "about 2-4 minutes" in out
    assert "build.log" in out
    flags = (tmp_path / "args").read_text().split()
    assert flags[0] == "-DLLAVA_BUILD=OFF"
    assert flags[1].endswith("lean.cmake")
    assert flags[2:] == ["-DGGML_NATIVE=OFF", "-DMINE=1"]
    assert len(list((tmp_path / "cache").rglob("*.whl"))) == 1
    assert list((tmp_path / "cache").rglob("build-*")) == []


@pytest.mark.parametrize(
    "body", ["echo it broke; exit 3", "exit 0", 'while [ "$1" != --wheel-dir ]; do shift; done; : > "$2/a.whl"']
)
def test_failed_build_leaves_no_wheel(script: ModuleType, pip, tmp_path: Path, capsys, body: str):
    """Whether pip fails, makes nothing or makes half a file."""
    pip(body)

    assert script.main(["--cache", str(tmp_path / "cache"), "--wheel-only"]) == 1
    assert "was not built" in capsys.readouterr().out
    assert list((tmp_path / "cache").rglob("*.whl")) == []


def test_missing_compiler_is_named_with_the_remedy(script: ModuleType, pip, monkeypatch, tmp_path: Path, capsys):
    pip("exit 9")
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)

    assert script.main(["--cache", str(tmp_path / "cache"), "--wheel-only"]) == 1
    assert "no C++ compiler found" in capsys.readouterr().out


def test_progress_is_the_last_count_of_the_log(script: ModuleType, tmp_path: Path):
    log = tmp_path / "build.log"
    log.write_text("[1/83] Building\n[12/83] Building\n")

    assert script.progress(log) == "file 12 of 83"


def test_second_builder_waits_for_the_first(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    waiting, order = threading.Event(), []
    monkeypatch.setattr(script, "print", lambda *_, **__: waiting.set(), raising=False)

    def second() -> None:
        with script.locked(tmp_path / "lock"):
            order.append("second")

    thread = threading.Thread(target=second)
    with script.locked(tmp_path / "lock"):
        thread.start()
        assert waiting.wait(30)
        order.append("first")
    thread.join(30)

    assert order == ["first", "second"]
