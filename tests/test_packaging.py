"""What is built from a checkout: the right names, the data files, and an installation that needs no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.gguf", ".*_cache", ".hypothesis")


def build(command: list[str], *, cwd: Path, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def wheel_from(source: Path, out: Path, **env: str) -> zipfile.ZipFile:
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir"]
    build(["-m", "pip", "wheel", *offline, "--wheel-dir", str(out), str(source)], cwd=out.parent, **env)
    (path,) = out.glob("bmoe-*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module", name="sdist")
def _sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    build(["-c", "from setuptools.build_meta import build_sdist; build_sdist('../out')"], cwd=folder / "tree")
    (path,) = (folder / "out").glob("bmoe-*.tar.gz")
    return path


@pytest.fixture(scope="module", name="wheel")
def _wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from the source distribution, which proves that that one is complete."""
    return wheel_from(sdist, tmp_path_factory.mktemp("wheel") / "out")


def test_wheel_installs_two_names_only(wheel: zipfile.ZipFile):
    top = {name.split("/")[0] for name in wheel.namelist()}

    assert {name for name in top if not name.endswith(".dist-info")} == {"bmoe", "bmoe_plugins"}


def test_wheel_has_the_data_files(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    profiles = {f"bmoe/profiles/{path.name}" for path in (ROOT / "core/profiles").glob("*.toml")}

    assert {"bmoe/py.typed", "bmoe_plugins/py.typed", "bmoe_plugins/registry.toml"} - names == set()
    assert profiles
    assert profiles - names == set()
    assert wheel.read("bmoe_plugins/registry.toml") == (ROOT / "registry.toml").read_bytes()


def test_wheel_has_every_module(wheel: zipfile.ZipFile):
    folders = {"core": "bmoe", "plugins": "bmoe_plugins"}
    modules = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in folders.items()
        for path in (ROOT / folder).rglob("*.py")
    }

    assert modules - set(wheel.namelist()) == set()


def test_wheel_has_the_compiled_seam(wheel: zipfile.ZipFile):
    """The extension is optional, so a mistake in it would go unnoticed where there is a compiler."""
    assert shutil.which("cc"), "the tests need a C compiler, as `make test` says"

    assert [name for name in wheel.namelist() if name.startswith("bmoe/native/_seam.")] != []


def test_source_distribution_has_what_a_build_needs(sdist: Path):
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}

    assert {"pyproject.toml", "README.md", "LICENSE", "core/native/_seam.c", "plugins/registry.toml"} - names == set()


def test_installs_without_a_compiler(sdist: Path, tmp_path: Path):
    """A compiler that always fails leaves out the C seam and nothing else."""
    wheel = wheel_from(sdist, tmp_path / "out", CC="/bin/false")
    assert [name for name in wheel.namelist() if name.endswith(".so")] == []

    wheel.extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", "import bmoe; print(bmoe.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == str(tmp_path / "site/bmoe/__init__.py"), done.stderr
