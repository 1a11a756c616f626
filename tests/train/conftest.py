"""The trainer is a script beside the package, not part of it: put its folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
if SCRIPTS not in sys.path:
    sys.path.append(SCRIPTS)
