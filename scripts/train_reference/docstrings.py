"""Prose of the standard library: paragraphs of docstrings that read as sentences."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

_SENTENCE = re.compile(r"[A-Z][^\n]*[.!?]$", re.DOTALL)


def paragraphs(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, paragraph) for every prose paragraph in the docstrings below `root`."""
    for path in sorted(root.rglob("*.py")):
        if not path.is_file() or "test" in path.parts or "idlelib" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                doc = ast.get_docstring(node)
                good = [p for p in re.split(r"\n\s*\n", inspect.cleandoc(doc or "")) if _is_prose(p)]
                if good:
                    text = "\n\n".join(re.sub(r"\s+", " ", p) for p in good)
                    yield f"{path.name}:{getattr(node, 'name', '')}:{getattr(node, 'lineno', 0)}", text[:900]


def _is_prose(paragraph: str) -> bool:
    flat = re.sub(r"\s+", " ", paragraph)
    letters = sum(c.isalpha() or c == " " for c in flat)
    return len(flat) >= 40 and bool(_SENTENCE.match(flat)) and letters > 0.9 * len(flat) and flat.isascii()
