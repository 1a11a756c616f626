"""Where the values of a profile come from, and which of them were refused: what messages need besides the values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bmoe.problems import Path, Problem, dotted


@dataclass(frozen=True)
class Origin:
    """``source`` is what messages call the profile; ``given`` names the argument that gave a path instead.

    ``order`` numbers the paths as they are written. ``refused`` has the problems found while loading, by path, and
    ``doubts`` every path whose value was taken away: its default is not what was meant.
    """

    source: str = "profile"
    given: Mapping[Path, str] = field(default_factory=dict)
    order: Mapping[Path, int] = field(default_factory=dict)
    refused: Mapping[Path, str] = field(default_factory=dict)
    doubts: frozenset[Path] = frozenset()

    def where(self, path: Path) -> str:
        """``FILE: a.b.c`` for a message; ``--set`` or ``--model`` in place of the file if the value came from there."""
        return f"{self.giver(path)}: {dotted(path)}"

    def giver(self, path: Path) -> str:
        """What gave the value at ``path``, or a table that it is in: an argument, or else :attr:`source`."""
        return next((self.given[above] for above in _upwards(path) if above in self.given), self.source)

    def in_doubt(self, path: Path) -> bool:
        """Whether the value at ``path``, or a table that it is in, was taken away."""
        return any(above in self.doubts for above in _upwards(path))

    def in_order(self, problems: Iterable[Problem]) -> list[str]:
        """The lines of ``problems`` in the order of the profile, each once; what it does not say comes last."""

        def place(problem: Problem) -> int:
            return next((self.order[path] for path in _upwards(problem.path) if path in self.order), len(self.order))

        return list(dict.fromkeys(problem.line for problem in sorted(problems, key=place)))


def order_of(value: object, path: Path = ()) -> dict[Path, int]:
    """Every path in a table, numbered as they are written."""
    found: dict[Path, int] = {}
    pending: list[tuple[Path, object]] = [(path, value)]
    while pending:
        at, item = pending.pop()
        found[at] = len(found)
        if isinstance(item, dict):
            pending += reversed([((*at, key), inner) for key, inner in item.items()])
        elif isinstance(item, list):
            pending += reversed([((*at, str(index)), inner) for index, inner in enumerate(item)])
    return found


def _upwards(path: Path) -> Iterable[Path]:
    """``path``, the table that it is in, and so on."""
    return (path[:length] for length in range(len(path), 0, -1))
