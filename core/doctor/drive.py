"""The drive that models lie on: is it there, what is it, does it bypass the page cache, how fast does it read."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bmoe.doctor.apart import Answer
from bmoe.doctor.findings import Check, Finding, Sources, note, number_of, ok, problem, size, text_of
from bmoe.doctor.software import NO_FETCHER, usable_fetchers
from bmoe.drives import drive_of, mount_of
from bmoe.telemetry import filesystem

PLACE = "place"
_SLOW = 200e6
_DISK = 2 << 30
_TRIAL = 1 << 20

GONE = "name a model file or a folder that is there and that you may read: bmoe doctor PATH"
NOT_A_MODEL = "name a .gguf file; bmoe reads no other"
EMPTY = "name a whole model file, or a folder"
NETWORK = "copy the model to a local drive: every expert that is not in the cache is read over the network"
REMOVABLE = "move the model to an internal drive, or leave this one plugged in while the model is open"
SD = "move the model to an SSD or UFS: an SD card reads some 20 to 90 MB/s, which is seconds for each token"
SPINNING = "move the model to an SSD: a disk that spins needs milliseconds for each expert"
WINDOWS = "copy the model into WSL's own file system (under ~): drives of Windows are reached over a protocol"
SHARED = "copy the model into the app's own folder (Termux: ~): shared storage goes through FUSE on every read"
FUSE = "copy the model to a file system of the kernel: through FUSE every read takes a detour, often without direct I/O"
OVERLAY = "put the model on a volume (docker -v): in a container's own layers it is copied and may be read indirectly"
IN_MEMORY = "put the model on a drive: here it takes the memory that it should save"
BUFFERED = "use another drive or file system (ext4, xfs, f2fs); reads work, and the page cache competes with bmoe's own"
NOT_WRITABLE = "name a model file instead of the folder: it is only read"
FULL = "free some disk space, or name a model file instead of the folder"
UNREADABLE = "check the drive and its cable, and the system's log (dmesg) for errors"
SLOW = "use a faster drive, a larger cache (cache.budget_mb) or a smaller quantisation; what limits is reading"
UNMEASURED = "name a larger model file, or a folder with more free space"


def place(sources: Sources) -> Finding:
    """Whether there is something to read."""
    path = sources.path
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        return problem(f"{path}: {getattr(error, 'strerror', None) or error}", GONE)
    if stat.S_ISDIR(found.st_mode):
        readable = os.access(path, os.R_OK | os.X_OK)
        return ok(f"{path}, a folder") if readable else problem(f"{path}: the folder may not be read", GONE)
    if not stat.S_ISREG(found.st_mode):
        return problem(f"{path}: neither a file nor a folder", GONE)
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError as error:
        return problem(f"{path}: {error.strerror}", GONE)
    if not found.st_size:
        return note(f"{path}: an empty file", EMPTY)
    if head != b"GGUF":
        return note(f"{path}: not a gguf file", NOT_A_MODEL)
    return ok(f"{path}, {size(found.st_size)}", file_bytes=found.st_size)


def file_system(sources: Sources) -> Finding:
    """What kind of drive and file system it is."""
    drive = drive_of(sources.path, sources.root)
    kind, source = filesystem(sources.path, str(sources.root / "proc"))
    kind = kind or drive.kind or "unknown"
    block = _block(sources.root, sources.path)
    shown = f"{kind} on {source}" if source and source != kind else kind
    remedy = _kind_remedy(kind, os.path.realpath(sources.path), sources)
    card = block is not None and text_of(block / "device/type") == "SD"
    if not remedy and card:
        remedy, shown = SD, f"{shown}, an SD card"
    elif not remedy and drive.removable:
        remedy, shown = REMOVABLE, f"{shown}, removable"
    elif not remedy and block is not None and _spins(block):
        remedy, shown = SPINNING, f"{shown}, a spinning disk"
    values = {"kind": kind, "source": source, "network": drive.network, "removable": drive.removable, "sd_card": card}
    return note(shown, remedy, **values) if remedy else ok(shown, **values)


def _spins(block: Path) -> bool:
    """Whether a disk says that it spins; virtual ones often do so, and do not."""
    virtual = block.name.startswith(("vd", "xvd", "loop", "dm-")) or "virtual" in block.parts
    return not virtual and number_of(block / "queue/rotational") == 1


def _kind_remedy(kind: str, path: str, sources: Sources) -> str:
    """What to do about a file system of this kind; "" if nothing."""
    wsl = "microsoft" in text_of(sources.root / "proc/sys/kernel/osrelease").lower()
    if kind in ("9p", "drvfs", "v9fs", "virtiofs") and wsl:
        return WINDOWS
    if drive_of(sources.path, sources.root).network:
        return NETWORK
    if kind in ("tmpfs", "ramfs", "hugetlbfs"):
        return IN_MEMORY
    if kind in ("overlay", "aufs"):
        return OVERLAY
    if kind in ("sdcardfs", "esdfs") or (kind == "fuse" and path.startswith(("/storage/", "/sdcard", "/mnt/media_rw"))):
        return SHARED
    return FUSE if kind.startswith("fuse") else ""


def _block(root: Path, path: str) -> Path | None:
    """The folder of the disk under /sys that a file lies on; of a partition the disk's own. None if it is not shown."""
    device = os.stat(path).st_dev
    for numbers in (mount_of(os.path.realpath(path), root)[1], f"{os.major(device)}:{os.minor(device)}"):
        try:
            folder = (root / "sys/dev/block" / (numbers or "none")).resolve(strict=True)
        except OSError:
            continue
        for _ in range(4):  # what is mapped onto another (dm-crypt, LVM) is as that one is
            below = sorted((folder / "slaves").glob("*")) if (folder / "slaves").is_dir() else []
            if not below:
                break
            folder = below[0].resolve()
        return folder.parent if (folder / "partition").exists() else folder
    return None


def free_space(sources: Sources) -> Finding:
    """Room for a model."""
    found = os.statvfs(sources.path)
    free = found.f_bavail * found.f_frsize
    shown = f"{size(free)} free of {size(found.f_blocks * found.f_frsize)}"
    read_only = bool(found.f_flag & getattr(os, "ST_RDONLY", 1))
    values = {"free_bytes": free, "read_only": read_only}
    if read_only:
        return ok(f"{shown}, read-only", **values)
    return note(shown, FULL, **values) if free < _DISK else ok(shown, **values)


def direct(sources: Sources) -> Finding:
    """Whether reads really bypass the page cache, tried on the file or on one that is made for it."""
    answer = _ask(sources, "probe_direct", (sources.path, _TRIAL), 15)
    told = answer.told[-1] if answer.told and "direct" in answer.told[-1] else None
    if told is None:
        return _untold(answer.failure)
    if told["direct"]:
        return ok(f"yes: {told['tried']} read both ways give the same bytes", direct=True)
    return note(f"no: {told['note']}", BUFFERED, direct=False)


def _ask(sources: Sources, probe: str, arguments: Sequence[Any], seconds: float) -> Answer:
    """Ask a probe that may make a file; should it be ended where files keep their names, the file goes here."""
    answer = sources.ask(f"reads:{probe}", arguments, seconds)
    for each in answer.told:
        if "temporary" in each:
            with contextlib.suppress(OSError):
                os.unlink(each["temporary"])
    return answer


def _untold(failure: str) -> Finding:
    """A probe of reads that did not come to its end."""
    if failure.startswith("full: "):
        return note(failure.removeprefix("full: "), FULL)
    if failure.startswith("not writable: "):
        return note(failure.removeprefix("not writable: "), NOT_WRITABLE)
    if failure.startswith("small: "):
        return note(failure.removeprefix("small: "), UNMEASURED)
    return note(failure or "nothing was told", UNREADABLE)


def bandwidth(sources: Sources) -> Finding:
    """Bytes a second of every fetcher that can run here, by lanes and size of reads, at random places."""
    names, refused = usable_fetchers(sources)
    if not names:
        return note(f"no fetcher can run here: {', '.join(refused) or 'there is none'}", NO_FETCHER)
    answer = _ask(sources, "probe_bandwidth", (sources.path, names, sources.quick), 20 if sources.quick else 40)
    cells = [each for each in answer.told if "bytes_per_s" in each]
    wrong = {each["fetcher"]: each["error"] for each in answer.told if "error" in each}
    if not cells:
        reason = answer.failure or "; ".join(f"{name}: {why}" for name, why in wrong.items())
        return _untold(reason)
    best = {name: max((c for c in cells if c["fetcher"] == name), key=_rate, default=None) for name in names}
    shown = "; ".join(
        f"{name} {_rate(cell) / 1e9:.2f} GB/s ({lanes(cell['lanes'])}, {size(cell['read_bytes'])})"
        for name, cell in best.items()
        if cell is not None
    )
    if not all(each.get("direct", True) for each in cells):
        shown += "; through the page cache, so partly from memory"
    for name, why in wrong.items():
        shown += f"; {name} failed: {why}"
    if answer.failure:
        shown += f"; then {answer.failure}"
    planned = next((each["cells"] for each in answer.told if "cells" in each), len(cells))
    if len(cells) < planned:
        shown += f"; {len(cells)} of {planned} combinations in the time"
    if wrong or answer.failure:
        return note(shown, UNREADABLE, grid=cells)
    top = max(map(_rate, cells))
    return note(shown, SLOW, grid=cells) if top < _SLOW else ok(shown, grid=cells)


def lanes(count: int) -> str:
    """A number of lanes in words."""
    return f"{count} lane" if count == 1 else f"{count} lanes"


def _rate(cell: dict[str, Any]) -> float:
    return float(cell["bytes_per_s"])


_KINDS = (NETWORK, REMOVABLE, SD, SPINNING, WINDOWS, SHARED, FUSE, OVERLAY, IN_MEMORY)
_READS = (NOT_WRITABLE, FULL, UNREADABLE, UNMEASURED)

CHECKS = (
    Check(PLACE, "is there something to read", place, (GONE, NOT_A_MODEL, EMPTY), seconds=10, needed=True),
    Check("file system", "what does it lie on", file_system, _KINDS, seconds=10),
    Check("disk space", "is there room for a model", free_space, (FULL,), seconds=10),
    Check("direct I/O", "do reads bypass the page cache", direct, (BUFFERED, *_READS), seconds=20),
    Check("bandwidth", "how fast does each fetcher read", bandwidth, (SLOW, NO_FETCHER, *_READS), seconds=90),
)
