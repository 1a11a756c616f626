"""One HTML page of traces and run records: data, style and script inside, so that it opens anywhere without a network.

What files say is data to it: it is escaped where it is embedded, and the script puts it on the page as text only.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from bmoe.replay.route_trace import TraceError
from bmoe.telemetry import SCHEMA
from bmoe.trace.digest import digest
from bmoe.trace.reading import load

_MARK = "<!doctype html>\n<!-- bmoe trace view -->"


def write_page(paths: Sequence[str], out: str) -> list[str]:
    """Write a page of ``paths`` to ``out``, whole or not at all; what was amiss with the files, one line each.

    Raises :class:`TraceError` naming the file that is no trace, or a place that cannot be written to or that holds
    something else than such a page.
    """
    _may_replace(out)
    loaded = [load(path) for path in paths]
    notices = [notice for one in loaded for notice in one.notices]
    sections = [section for one in loaded for section in digest(one)]
    text = render(sections, notices)
    folder, name = os.path.split(out)
    part = ""
    try:
        descriptor, part = tempfile.mkstemp(prefix=f".{name}.", dir=folder or ".")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(part, 0o644)
        os.replace(part, out)
    except OSError as error:
        if part:
            with contextlib.suppress(OSError):
                os.unlink(part)
        raise TraceError(f"{out}: cannot be written ({error.strerror}); choose another place") from error
    return notices


def render(sections: Sequence[dict[str, Any]], notices: Sequence[str] = ()) -> str:
    """The page as text."""
    from jinja2 import Environment

    here = files("bmoe.trace")
    template = Environment(autoescape=True).from_string(here.joinpath("page.html.j2").read_text("utf-8"))
    data = json.dumps({"schema": SCHEMA, "sections": list(sections)}, allow_nan=False, separators=(",", ":"))
    for char, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):  # nothing in it ends the element
        data = data.replace(char, code)
    parts = {name: here.joinpath(f"page.{name}").read_text("utf-8") for name in ("css", "js")}
    title = ", ".join(str(section["file"]) for section in sections)
    return template.render(title=title, data=data, notices=notices, **parts)


def _may_replace(out: str) -> None:
    """A page may replace a page, and nothing else."""
    try:
        with open(out, encoding="utf-8", errors="replace") as file:
            head = file.read(len(_MARK))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{out}: cannot be written ({reason}); choose another place") from error
    if head and head != _MARK:
        raise TraceError(f"{out}: exists and is no page of bmoe, so it is not replaced; choose another place with -o")
