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
from dataclasses import dataclass
from pathlib import Path

from bmoe.cli.arguments import Parser, UsageError, choose
from bmoe.cli.output import complain, emit, emit_table
from bmoe.plugins import Catalog, load_all
from bmoe.registry import Registry, load_registry


@dataclass(frozen=True, slots=True)
class Subject:
    """One plugin under test: who provides ``kind:name``, and the gate classes that apply."""

    kind: str
    name: str
    plugin: str
    gates: tuple[str, ...]

    @property
    def label(self) -> str:
        """What the command line calls it."""
        return f"{self.kind}:{self.name}"


def main(arguments: Sequence[str]) -> int:
    """Run the gates; 0 if all pass, 1 if one fails."""
    parser = Parser(
        "bmoe gates",
        "Run the gates of plugins: the tests that every plugin of their kind has to pass. Without a name, all of\n"
        "bmoe's own; with --plugin, those of an installed plugin.",
        "bmoe gates cache:lru",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a plugin, as NAME or KIND:NAME")
    parser.add_argument(
        "--plugin", metavar="DIST", help="test what this installed plugin provides (as in plugins.enable)"
    )
    parser.add_argument("--list", action="store_true", help="list what would be tested")
    parser.add_argument("-k", dest="only", metavar="EXPRESSION", help="only tests that match, as in pytest")
    parsed = parser.parse(arguments)
    registry = load_registry()
    if parsed.plugin is None:
        found = _in_tree(registry)
    else:
        found = _installed(load_all(registry, [parsed.plugin]), registry, parsed.plugin)
    subjects = _chosen(found, parsed.names)
    if parsed.list:
        emit_table(("plugin", "gates"), [(s.label, ", ".join(s.gates) or "none yet") for s in subjects])
        return 0
    for subject in subjects:
        if not subject.gates:
            complain(f"{subject.label}: there are no gates for it yet")
    subjects = [subject for subject in subjects if subject.gates]
    if not subjects:
        raise UsageError("nothing to test: none of these plugins has a gate")
    for module in ("pytest", "hypothesis"):
        if importlib.util.find_spec(module) is None:
            raise UsageError(f'gates need {module}, which is not installed; pip install "bmoe[dev]"')
    return _run(subjects, parsed.only)


def _in_tree(registry: Registry) -> list[Subject]:
    available = set(_gate_classes())
    return [
        Subject(row.kind, row.name, "bmoe", tuple(gate for gate in row.gates if gate in available))
        for row in registry.rows
    ]


def _installed(catalog: Catalog, registry: Registry, plugin: str) -> list[Subject]:
    """What ``plugin`` provides; its gates are those that bmoe's own plugins of the same kind pass."""
    own = _in_tree(registry)
    names = [("arch", name) for name in catalog.archs]
    names += [(kind, name) for kind, providers in catalog.providers.items() for name in providers]
    subjects = []
    for kind, name in names:
        if catalog.origin(kind, name) == plugin:
            gates = dict.fromkeys(gate for subject in own if subject.kind == kind for gate in subject.gates)
            subjects.append(Subject(kind, name, plugin, tuple(gates)))
    if not subjects:
        raise UsageError(f'installed plugin "{plugin}" provides nothing that could be tested')
    return subjects


def _gate_classes() -> Iterable[str]:
    import bmoe.testing

    return [name for name in bmoe.testing.__all__ if name.endswith("Gates")]


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
    lines = [f"from bmoe.testing import {', '.join(gates)}", ""]
    for subject in subjects:
        for gate in subject.gates:
            title = "".join(word.capitalize() for word in re.split(r"\W|_", f"{subject.kind} {subject.name}"))
            lines += ["", f"class Test{title}{gate}({gate}):"]
            lines.append(f"    plugin, provider = {subject.plugin!r}, {subject.name!r}")
            if subject.kind == "arch":
                lines.append(f"    arch = {subject.name!r}")
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
