"""A shell for the commands that pages print: ``bmoe`` and the tools beside this Python are on its path."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shell:
    """Runs lines in ``folder``; what is installed in ``site`` is found as well."""

    folder: Path
    site: Path

    def __call__(self, line: str) -> str:
        """What ``line`` prints on both streams. It has to succeed."""
        return self.run(line).stdout

    def run(self, line: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        bin_folder = self.site / "bin"
        bin_folder.mkdir(parents=True, exist_ok=True)
        for name, module in (("bmoe", "bmoe.cli"), ("pytest", "pytest")):
            script = bin_folder / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
            script.chmod(0o755)
        paths = [str(self.site), os.environ.get("PYTHONPATH", "")]
        found = [str(bin_folder), os.environ["PATH"], sysconfig.get_path("scripts")]
        env = {**os.environ, "PATH": os.pathsep.join(found), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(
            line, shell=True, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{line}\n{done.stdout}"
        return done
