"""The house rules that a machine can check: who may import whom; where native code, printing, the environment live."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGES = {"core": "bmoe", "plugins": "bmoe_plugins"}

# From the bottom up. A module may import those of lower rows and its own package; those of one row are strangers.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset({"drafts", "facts", "problems", "reads", "records"}),
    frozenset({"bundled", "contracts"}),
    frozenset(
        {
            "copies",
            "diagnosis",
            "drives",
            "headcheck",
            "hookspecs",
            "header",
            "log",
            "machine",
            "origin",
            "process",
            "routers",
            "tables",
            "values",
            "widths",
        }
    ),
    frozenset({"diagnosis", "scratch", "shards", "states"}),
    frozenset({"candidates", "draftlength", "fingerprint", "layout", "native", "rows", "salvage", "tree", "watcher"}),
    frozenset({"draftmodel", "heat", "profile", "verdicts"}),
    frozenset({"budget", "pages", "pressure", "probe", "registry", "selection", "undriven"}),
    frozenset({"plugins"}),
    frozenset({"choices"}),
    frozenset({"claims"}),
    frozenset({"plan"}),
    frozenset({"planner"}),
    frozenset({"bind", "inspection", "replay", "resolve", "synth", "telemetry"}),
    frozenset({"frames", "governor", "importance", "loss", "opened", "sight", "weights"}),
    frozenset({"store"}),
    frozenset({"guesses", "preload", "slots", "verified"}),
    frozenset({"cachesize", "knobs", "lane"}),
    frozenset({"stream"}),
    frozenset({"costs"}),
    frozenset({"decode", "trace"}),
    frozenset({"guessers"}),
    frozenset({"engine"}),
    frozenset({"drafting", "head"}),
    frozenset({"draftaccount"}),
    frozenset({"account"}),
    frozenset({"conversation"}),
    frozenset({"evaluate", "fit", "routes", "serve"}),
    frozenset({"bench", "doctor", "testing"}),
    frozenset({"cli"}),
)
UPWARDS = {("engine", "conversation")}  # `engine.conversation()` makes one; imported inside that method
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
FACADES = {"bmoe", "bmoe._pytest_plugin"}
NATIVE_USERS = {
    "verified",
    "guessers",
    "cachesize",
    "engine",
    "guesses",
    "head",
    "knobs",
    "lane",
    "conversation",
    "decode",
    "doctor",
    "sight",
    "stream",
    "weights",
    "store",
    "trace",
    "slots",
    "frames",
    "pages",
    "probe",
    "fit",
    "testing",
    "native",
}
PLUGIN_MAY = {"bmoe", "bmoe.contracts", "bmoe.errors"}
KIND_MAY = {
    "fetch": {"bmoe.native.aio", "bmoe.native.io", "bmoe.native.memory", "bmoe.native.uring"},
    "dense": {
        "bmoe.native.hardware_buffer",
        "bmoe.native.io",
        "bmoe.native.memory",
        "bmoe.native.repack",
        "bmoe.native.residency",
    },
    "draft": {"bmoe.candidates"},
    "prefetch": {"bmoe.routers"},
    "routing": {"bmoe.routers"},
    "archs": {"bmoe.registry"},  # where the rows are
    "sinks": {"bmoe.telemetry"},  # the form that records have outside
}
WITHOUT_NATIVE = (
    "contracts",
    "hookspecs",
    "profile",
    "rows",
    "registry",
    "machine",
    "plugins",
    "choices",
    "plan",
    "planner",
    "resolve",
    "bind",
    "replay",
)


@dataclass(frozen=True)
class Source:
    """One Python file of the two packages."""

    path: Path

    @property
    def shown(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def parts(self) -> tuple[str, ...]:
        folder, *rest = self.path.relative_to(ROOT).with_suffix("").parts
        return (PACKAGES[folder], *(part for part in rest if part != "__init__"))

    @property
    def module(self) -> str:
        return ".".join(self.parts)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and absolute name of every module imported at run time, inside functions too."""
        for node in self.running(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = self.absolute(node)
                for alias in node.names:
                    whole = f"{module}.{alias.name}"
                    yield node.lineno, whole if whole in MODULES else module

    def absolute(self, node: ast.ImportFrom) -> str:
        package = self.parts if self.path.name == "__init__.py" else self.parts[:-1]
        base = package[: len(package) - node.level + 1] if node.level else ()
        return ".".join([*base, *([node.module] if node.module else [])])

    @classmethod
    def running(cls, node: ast.AST) -> Iterator[ast.AST]:
        """All nodes but those that only type checkers see."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                children: list[ast.AST] = list(child.orelse)
            else:
                children = [child]
            for each in children:
                yield each
                yield from cls.running(each)


SOURCES = [Source(path) for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))]
MODULES = {source.module for source in SOURCES}
CORE = [source for source in SOURCES if source.parts[0] == "bmoe"]
PLUGINS = [source for source in SOURCES if source.parts[0] == "bmoe_plugins"]


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def calls(source: Source) -> Iterator[tuple[int, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def found(hits: list[tuple[Source, int, str]]) -> list[str]:
    return [f"{source.shown}:{line}: {text}" for source, line, text in hits]


def test_every_core_module_has_a_place_in_the_layers():
    placed = {source.parts[1] for source in CORE if source.module not in FACADES}

    assert sorted(placed - set(RANK)) == [], "give the module a row in LAYERS, as low as its imports allow"


def test_core_imports_point_downwards():
    hits = []
    for source in CORE:
        if source.module in FACADES:
            continue
        own = source.parts[1]
        for line, name in source.imports():
            if within(name, "bmoe_plugins"):
                hits.append((source, line, f"core never names a plugin's module: {name}"))
            elif name == "bmoe" and own not in {"cli", "testing"}:
                hits.append((source, line, "import the module that defines the name, not the public facade"))
            elif within(name, "bmoe") and name != "bmoe":
                other = name.split(".")[1]
                if other != own and (own, other) not in UPWARDS and RANK.get(other, 0) >= RANK.get(own, len(LAYERS)):
                    hits.append((source, line, f"{own} may not import {other}"))

    assert found(hits) == []


def test_native_is_used_by_the_mechanism_only():
    hits = [
        (source, line, name)
        for source in CORE
        if source.module not in FACADES and source.parts[1] not in NATIVE_USERS
        for line, name in source.imports()
        if within(name, "bmoe.native")
    ]

    assert found(hits) == []


def test_plugins_import_only_what_is_public_to_them():
    hits = []
    for source in PLUGINS:
        kind = "".join(source.parts[1:2])
        allowed = PLUGIN_MAY | KIND_MAY.get(kind, set())
        for line, name in source.imports():
            sibling = within(name, f"bmoe_plugins.{kind}")
            shared = sibling and name.rsplit(".", 1)[-1].startswith("_")
            if (within(name, "bmoe") and name not in allowed) or (within(name, "bmoe_plugins") and not shared):
                hits.append((source, line, name))

    assert found(hits) == []


def test_ctypes_is_used_in_native_only():
    hits = [
        (source, line, name)
        for source in SOURCES
        if not within(source.module, "bmoe.native")
        for line, name in source.imports()
        if within(name, "ctypes") or within(name, "_ctypes")
    ]

    assert found(hits) == []


def test_only_the_command_line_prints():
    hits = [
        (source, line, name)
        for source in SOURCES
        if not within(source.module, "bmoe.cli")
        for line, name in calls(source)
        if name == "print"
    ]

    assert found(hits) == []


def test_only_the_command_line_reads_the_environment():
    hits = [
        (source, node.lineno, ast.unparse(node))
        for source in SOURCES
        if not within(source.module, "bmoe.cli")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.environb", "os.getenv"}
    ]
    hits += [
        (source, node.lineno, alias.name)
        for source in SOURCES
        if not within(source.module, "bmoe.cli")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os"
        for alias in node.names
        if alias.name in {"environ", "environb", "getenv"}
    ]

    assert found(hits) == []


def test_one_file_touches_pluggy_hooks():
    """Every other module works on what was collected, so nothing can call a hook after binding."""
    hits = [
        (source, node.lineno, ast.unparse(node))
        for source in SOURCES
        if source.module != "bmoe.plugins"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr == "hook"
    ]

    assert found(hits) == []


def test_files_stay_short():
    folders = [ROOT / name for name in ("core", "plugins", "tests", "scripts", "benchmarks", "examples")]
    files = [path for folder in folders for suffix in ("*.py", "*.c") for path in folder.rglob(suffix)]
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines()) for path in files}

    assert {name: count for name, count in lengths.items() if count > 400} == {}


def test_names_say_a_role():
    vague = {"util", "utils", "helper", "helpers", "common", "misc", "base"}

    assert [source.shown for source in SOURCES if source.path.stem.strip("_") in vague] == []


@pytest.mark.parametrize("folder", ["core", "plugins", "scripts"])
def test_every_module_says_what_it_is(folder: str):
    files = sorted((ROOT / folder).rglob("*.py"))

    assert [
        path.relative_to(ROOT).as_posix() for path in files if not ast.get_docstring(ast.parse(path.read_text()))
    ] == []


def test_no_test_lives_inside_a_package():
    """There it would be imported as ``core.…`` or ``plugins.…``, beside the real module."""
    assert [source.shown for source in SOURCES if source.path.name.startswith("test_")] == []


def test_packages_match_the_tree():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]

    assert sorted(declared) == sorted(source.module for source in SOURCES if source.path.name == "__init__.py")


def run(code: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("folder", "name"), PACKAGES.items())
def test_import_by_the_folder_name_is_refused(folder: str, name: str):
    """From the checkout ``import core`` finds the folder; two copies of every class would be the result."""
    done = run(f"import {folder}", cwd=ROOT)

    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("ImportError: ")
    assert name in done.stderr.splitlines()[-1]


PURE = [f"bmoe.{name}" for name in WITHOUT_NATIVE if f"bmoe.{name}" in MODULES]
PURE += [source.module for source in PLUGINS if source.parts[1:2] in {("caches",), ("archs",)}]


@pytest.mark.parametrize("module", ["bmoe", *PURE])
def test_configuration_and_policies_import_without_llama_cpp(module: str, tmp_path: Path):
    """A profile can be checked and a policy tested on a machine that has neither llama-cpp-python nor numpy."""
    block = "import sys; sys.modules['llama_cpp'] = sys.modules['numpy'] = sys.modules['gguf'] = None"
    done = run(f"{block}; import {module}", cwd=tmp_path)

    assert done.stderr == ""
