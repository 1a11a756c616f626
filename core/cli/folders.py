"""Where the command line keeps what it may lose at any time."""

from __future__ import annotations

import os
from pathlib import Path


def fetch_memory() -> Path | None:
    """The file of :mod:`bmoe.verdicts`, fetchers by drive and policies by model; None where the user has no folder."""
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME", "")
    if os.path.isabs(cache):
        return Path(cache) / "bmoe" / "fetch.json"
    return Path(home) / ".cache" / "bmoe" / "fetch.json" if os.path.isabs(home) else None
