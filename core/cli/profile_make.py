"""``bmoe profile make``: the profile that ``bmoe fit`` chooses for a model, written with its reasons."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmoe.bundled import bundled_models
from bmoe.cli.arguments import Parser, UsageError
from bmoe.cli.fit import add_fit_arguments, judge_here, model_facts
from bmoe.cli.output import emit
from bmoe.errors import BmoeError
from bmoe.profile import load_profile

if TYPE_CHECKING:
    from bmoe.fit.verdict import Fit

EXAMPLE = "bmoe profile make model.gguf -o fit.toml"


def make(arguments: Sequence[str]) -> int:
    """Print the profile, or write it to a file that is not there yet; 1 if the model does not run here."""
    parser = Parser(
        "bmoe profile make",
        "Write the profile that suits a model and this machine, with the reasons as comments. Nothing in it changes\n"
        "what the model says.",
        EXAMPLE,
    )
    add_fit_arguments(parser, "the model file, of several the first; or the name of a bundled one")
    parser.add_argument("-o", "--out", metavar="FILE", help="the file to write; standard output without")
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    parsed = parser.parse(arguments)
    if "://" in parsed.model:
        raise UsageError(f"profile make: a profile names a file; download the model first; example: {EXAMPLE}")
    out = Path(parsed.out) if parsed.out is not None else None
    if out is not None:
        _check(out, force=parsed.force)
    with model_facts(parsed.model) as (facts, _):
        fit = judge_here(parsed, facts)
    if not fit.runs:
        raise BmoeError(f"{parsed.model}: does not run here: {fit.reason}")
    from bmoe.cli.profile import toml_lines

    name = parsed.model if parsed.model in bundled_models() else os.path.abspath(parsed.model)
    overrides = [*(setting.override for setting in fit.choice.settings), *parsed.overrides]
    profile = load_profile(fit.choice.name, model=name, overrides=overrides)
    values = profile.model_dump(mode="json", exclude_defaults=True)
    values["model"]["path"] = name
    text = "\n".join([*_head(fit), *_commented(toml_lines(values), fit)]).rstrip() + "\n"
    if out is None:
        emit(text)
        return 0
    _write(out, text, force=parsed.force)
    emit(f"{out}: written, for bmoe --profile {out}\n")
    return 0


def _head(fit: Fit) -> Iterator[str]:
    found, hits = fit.estimate, fit.hits
    assert found is not None
    assert hits is not None
    yield _line(
        f"For {fit.facts.name}, by bmoe profile make, after the bundled profile {fit.choice.name}: {fit.choice.why}."
    )
    rate = (
        ""
        if fit.measured is None or fit.measured.drive is None
        else f", with a hit rate of {100 * hits.expected:.0f} %"
    )
    yield _line(f"Expected: {found.low:.3g} to {found.high:.3g} tok/s{rate}.")
    yield ""


def _commented(lines: Iterator[str], fit: Fit) -> Iterator[str]:
    """``lines`` of TOML, each setting's reason above it."""
    reasons = {setting.path: setting.why for setting in fit.choice.settings}
    section = ""
    for block in lines:
        for line in block.splitlines() or [""]:
            if line.startswith("["):
                section = line.strip("[]")
            key = f"{section}.{line.partition(' = ')[0]}"
            if key in reasons:
                yield _line(f"{reasons[key]}")
            yield line


def _line(text: str) -> str:
    """A comment; what a file said cannot end it."""
    return "# " + "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _check(out: Path, *, force: bool) -> None:
    if out.is_symlink() or (out.exists() and not out.is_file()):
        raise UsageError(f"-o {out}: is no regular file; name another")
    if out.exists() and not force:
        raise UsageError(f"-o {out}: is there already; name another, or replace it with --force")
    if not out.parent.is_dir():
        raise UsageError(f"-o {out}: there is no folder {out.parent}; make it first, or name another file")


def _write(out: Path, text: str, *, force: bool) -> None:
    """Write the whole file or nothing. Raises :class:`UsageError`."""
    name: Any = None
    try:
        fd, name = tempfile.mkstemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        _check(out, force=force)  # something else may have come there while it was measured
        os.replace(name, out)
    except OSError as error:
        raise UsageError(f"-o {out}: cannot be written ({error.strerror}); name another file") from error
    finally:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
