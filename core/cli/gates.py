"""``bmoe gates``: run the tests that a plugin of its kind has to pass, bmoe's own plugins and others alike.

Gates are classes of :mod:`bmoe.testing`; this writes a test file that subclasses them for the chosen plugins and hands
it to pytest. Recorded figures of a policy belong to its own tests, so they are printed here and not compared.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bmoe.cli.arguments import Parser, UsageError, choose
from bmoe.cli.output import complain, emit, emit_table
from bmoe.layout import read_model
from bmoe.plugins import Catalog, load_all, load_plugins
from bmoe.profile import load_profile
from bmoe.registry import Registry, load_registry
from bmoe.rows import read_rows
from bmoe.synth import SHAPES


@dataclass(frozen=True, slots=True)
class Subject:
    """One plugin under test: who provides ``kind:name``, and the gate classes that apply.

    An architecture may come from a TOML file of ``rows``, and be tested with a ``model`` that is not synthetic.
    """

    kind: str
    name: str
    plugin: str
    gates: tuple[str, ...]
    rows: str | None = None
    model: str | None = None

    @property
    def label(self) -> str:
        """What the command line calls it."""
        return f"{self.kind}:{self.name}"


def main(arguments: Sequence[str]) -> int:
    """Run the gates; 0 if all pass, 1 if one fails."""
    parser = Parser(
        "bmoe gates",
        "Run the gates of plugins: the tests that every plugin of their kind has to pass. Without a name, all of\n"
        "bmoe's own; with --plugin, those of an installed plugin; with --archs, those of the rows in a TOML file.",
        "bmoe gates cache:lru",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a plugin, as NAME or KIND:NAME")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--plugin", metavar="NAME", help="test what this installed plugin provides (its name in plugins.enable)"
    )
    source.add_argument("--archs", metavar="FILE", help="test the architecture rows of this TOML file")
    parser.add_argument("--model", metavar="FILE", help="small model to test an architecture with")
    parser.add_argument("--list", action="store_true", help="list what would be tested")
    parser.add_argument("-k", dest="only", metavar="EXPRESSION", help="only tests that match, as in pytest")
    parsed = parser.parse(arguments)
    registry = load_registry()
    catalog = _catalog(registry, parsed.plugin, parsed.archs)
    if parsed.plugin is not None:
        found = _installed(catalog, registry, parsed.plugin)
    elif parsed.archs is not None:
        found = _in_file(parsed.archs, registry)
    else:
        found = _in_tree(registry)
    _refuse_what_cannot_run(catalog, parsed.names)
    subjects = _chosen(found, parsed.names)
    if parsed.model is not None:
        subjects = _with_model(subjects, parsed.model, catalog)
    if parsed.list:
        emit_table(("plugin", "gates"), [(s.label, ", ".join(s.gates) or "none yet") for s in subjects])
        return 0
    for subject in subjects:
        if not subject.gates:
            complain(f"{subject.label}: there are no gates for it yet")
    subjects = [subject for subject in subjects if subject.gates]
    if not subjects:
        raise UsageError("nothing to test: none of these plugins has a gate")
    for subject in subjects:
        if subject.kind == "arch" and subject.model is None and not _has_tiny(subject.name):
            raise UsageError(f"{subject.label}: bmoe has no small model of it to test with; give one with --model FILE")
    for module in ("pytest", "hypothesis"):
        if importlib.util.find_spec(module) is None:
            raise UsageError(f'gates need {module}, which is not installed; pip install "bmoe[dev]"')
    return _run(subjects, parsed.only)


def _catalog(registry: Registry, plugin: str | None, archs: str | None) -> Catalog:
    if archs is not None:
        read_rows(archs)  # in its own words, before there is a profile that names it
        table = {"plugins": {"archs": [str(Path(archs).absolute())]}}
        return load_plugins(load_profile(table), registry)
    return load_all(registry, [] if plugin is None else [plugin], "--plugin")


def _in_file(path: str, registry: Registry) -> list[Subject]:
    """The rows of a TOML file, with the gates of bmoe's own rows."""
    rows = str(Path(path).absolute())
    gates = _gates_of("arch", registry)
    return [Subject("arch", row.name, "bmoe", gates, rows) for row in read_rows(path) if not row.cannot]


def _gates_of(kind: str, registry: Registry) -> tuple[str, ...]:
    return tuple(dict.fromkeys(gate for own in _in_tree(registry) if own.kind == kind for gate in own.gates))


def _has_tiny(arch: str) -> bool:
    return any(shape.arch == arch and name.startswith("tiny-") for name, shape in SHAPES.items())


def _with_model(subjects: list[Subject], model: str, catalog: Catalog) -> list[Subject]:
    """``subjects`` with ``model`` for the one architecture among them. ModelError if it cannot be used at all."""
    archs = [subject for subject in subjects if subject.kind == "arch"]
    if len(archs) != 1:
        named = ", ".join(subject.label for subject in archs) or "there is none"
        raise UsageError(f"--model {model}: goes with one architecture; name it ({named})")
    facts = read_model(model, catalog.archs)
    if facts.arch != archs[0].name:
        raise UsageError(f'--model {model}: is of architecture "{facts.arch}", not "{archs[0].name}"; give one of that')
    given = replace(archs[0], model=str(Path(model).absolute()))
    return [given if subject is archs[0] else subject for subject in subjects]


def _in_tree(registry: Registry) -> list[Subject]:
    """Bmoe's own plugins, each architecture for itself."""
    available = set(_gate_classes())
    subjects = []
    for row in registry.rows:
        gates = tuple(gate for gate in row.gates if gate in available)
        names = [arch.name for arch in registry.archs if not arch.cannot] if row.kind == "arch" else [row.name]
        subjects += [Subject(row.kind, name, "bmoe", gates) for name in names]
    return subjects


def _installed(catalog: Catalog, registry: Registry, plugin: str) -> list[Subject]:
    """What ``plugin`` provides; its gates are those that bmoe's own plugins of the same kind pass."""
    names = [("arch", name) for name, row in catalog.archs.items() if not row.cannot]
    names += [(kind, name) for kind, providers in catalog.providers.items() for name in providers]
    subjects = []
    for kind, name in names:
        if catalog.origin(kind, name) == plugin:
            subjects.append(Subject(kind, name, plugin, _gates_of(kind, registry)))
    if not subjects:
        raise UsageError(f'installed plugin "{plugin}" provides nothing that could be tested')
    return subjects


def _gate_classes() -> Iterable[str]:
    import bmoe.testing

    return [name for name in bmoe.testing.__all__ if name.endswith("Gates")]


def _refuse_what_cannot_run(catalog: Catalog, names: Sequence[str]) -> None:
    for name in names:
        row = catalog.archs.get(name.removeprefix("arch:"))
        if row is not None and row.cannot:
            raise UsageError(f"arch:{row.name}: cannot be tested, since no model of it can be run: it {row.cannot}")


def _chosen(found: list[Subject], names: Sequence[str]) -> list[Subject]:
    if not names:
        return found
    known = list(dict.fromkeys([s.label for s in found] + [s.name for s in found]))
    wanted = {choose(name, known, "plugin") for name in names}
    return [subject for subject in found if subject.name in wanted or subject.label in wanted]


def _run(subjects: Sequence[Subject], only: str | None) -> int:
    with tempfile.TemporaryDirectory(prefix="bmoe-gates-") as folder:
        root = Path(folder)
        (root / "test_gates.py").write_text(gate_file(subjects), encoding="utf-8")
        (root / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
        (root / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n", encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(root / "pytest.ini")]
        command += ["--rootdir", folder, str(root / "test_gates.py"), *(("-k", only) if only else ())]
        emit("".join(f"{subject.label}: {', '.join(subject.gates)}\n" for subject in subjects))
        code = subprocess.run(command, check=False).returncode
    if code == 5:  # pytest's own number for "no tests ran"
        raise UsageError(f'no gate matches -k "{only}"')
    return 0 if code == 0 else 1


def gate_file(subjects: Sequence[Subject]) -> str:
    """The source of a test file with one subclass per plugin and gate."""
    gates = sorted({gate for subject in subjects for gate in subject.gates})
    lines = ["from pathlib import Path", "", f"from bmoe.testing import {', '.join(gates)}", ""]
    for subject in subjects:
        for gate in subject.gates:
            title = "".join(word.capitalize() for word in re.split(r"\W|_", f"{subject.kind} {subject.name}"))
            lines += ["", f"class Test{title}{gate}({gate}):"]
            lines.append(f"    plugin, provider = {subject.plugin!r}, {subject.name!r}")
            if subject.kind == "arch":
                lines.append(f"    arch = {subject.name!r}")
            if subject.rows is not None:
                lines.append(f"    rows = ({subject.rows!r},)")
            if subject.model is not None:
                lines += ["", "    def model(self, bench, quant=None):", f"        return Path({subject.model!r})"]
            if subject.kind == "cache":
                lines.append("    test_golden_hits = None")
            lines.append("")
    return "\n".join(lines)


_CONFTEST = '''\
"""Prints the figures that a policy's own tests record, where a gate has them."""


def pytest_collection_modifyitems(session, items):
    session.gate_classes = list(dict.fromkeys(item.cls for item in items if hasattr(item.cls, "play")))


def pytest_terminal_summary(terminalreporter):
    session = terminalreporter._session
    if session is None or session.testsfailed:
        return
    for gate in getattr(session, "gate_classes", ()):
        from bmoe.testing import traces

        hits = {name: gate().play(name).hits for name in sorted(traces.GOLDEN)}
        terminalreporter.write_line(f"{gate.provider}: golden = {hits}")
'''
