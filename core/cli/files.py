"""Files that a command writes: refused before any work is done for them, and replaced whole."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from bmoe.cli.arguments import UsageError
from bmoe.errors import BmoeError


def refuse_unwritable(option: str, path: str) -> None:
    """Raise :class:`UsageError` if ``path`` cannot become a file, or is something that is no regular file."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {folder}; make it, or give another place")
    try:
        mode = Path(path).lstat().st_mode
    except OSError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        raise UsageError(f"{option} {path}: is no regular file and is not replaced; give another name")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {path}: the folder cannot be written; give another place")


def replace_file(option: str, path: str, content: bytes) -> None:
    """Put ``content`` at ``path`` in one step, so that what was there is whole or gone.

    Raises :class:`BmoeError` naming the option.
    """
    part: str | None = None
    try:
        descriptor, part = tempfile.mkstemp(dir=Path(path).parent, prefix=f".{Path(path).name[:100]}.", suffix=".part")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(part, 0o666 & ~_mask())
        os.replace(part, path)
    except OSError as error:
        raise BmoeError(f"{option} {path}: {error.strerror or error}") from error
    finally:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)


def _mask() -> int:
    """The user's mask of permissions, which can be read only by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
