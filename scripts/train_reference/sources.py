"""Where the training text comes from: Debian packages, pinned by version and digest, and what their licences allow."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One Debian package: what of it is read, and under which licence."""

    name: str
    version: str
    sha256: str
    used: str
    licence: str


PACKAGES = (
    Package(
        "wordnet-base",
        "1:3.0-37",
        "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
        "definitions, examples and relations of the senses that SemCor counts",
        "WordNet 3.0 licence: use, copy, modify and distribute for any purpose, with its notice",
    ),
    Package(
        "bible-kjv-text",
        "4.38",
        "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a",
        "the text, without verse numbers",
        "public domain (translation of 1611); in the United Kingdom printing is under letters patent",
    ),
    Package(
        "miscfiles",
        "1.5+dfsg-4",
        "b29fdc907760ded52adbc1b4322da22b94108cd124caf0b23da8c23cc3578a28",
        "only the constitution and the declaration of independence of the United States",
        "public domain (the collection is GPL-2+, so nothing else of it is read)",
    ),
    Package(
        "libpython3.11-minimal",
        "3.11.2-6+deb12u8",
        "f3beaa03994ffedacf73c43a0843d53b062d347115d8af65bee2034552a4e6f9",
        "docstrings of the standard library",
        "PSF-2.0: derived works allowed, with its notice",
    ),
    Package(
        "libpython3.11-stdlib",
        "3.11.2-6+deb12u8",
        "890b3540dad8a1ccc0deeca025db735bcc82629a76adacbe3b50fcc06ed528ca",
        "docstrings of the standard library",
        "PSF-2.0: derived works allowed, with its notice",
    ),
)


class SourceError(RuntimeError):
    """A package could not be had as pinned."""


def fetch(folder: Path) -> dict[str, Path]:
    """Download and unpack the packages below `folder`; return each package's root. No root rights needed.

    Raises SourceError where the mirror has another version (the text would differ) or a digest does not match.
    """
    archives = folder / "debs"
    archives.mkdir(parents=True, exist_ok=True)
    roots = {}
    for package in PACKAGES:
        archive = _download(package, archives)
        root = folder / "packages" / package.name
        if not root.is_dir():
            root.parent.mkdir(exist_ok=True)
            subprocess.run(["dpkg", "-x", str(archive), str(root)], check=True)
        roots[package.name] = root
    return roots


def _download(package: Package, folder: Path) -> Path:
    pattern = f"{package.name}_{package.version.replace(':', '%3a')}_*.deb"
    if not list(folder.glob(pattern)):
        wanted = f"{package.name}={package.version}"
        done = subprocess.run(["apt-get", "download", wanted], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise SourceError(f"apt-get download {wanted}: {last}; try `apt-get update`, or the release that has it")
    archive = next(iter(folder.glob(pattern)))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise SourceError(f"{archive}: sha256 {digest}, expected {package.sha256}; remove the file and fetch again")
    return archive
