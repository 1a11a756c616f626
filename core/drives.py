"""Which drive a file lies on: device number, file system, whether it is behind a network or can be pulled out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "prl_fs"}
_NETWORK |= {"smb2", "smb3", "smbfs", "vboxsf", "vmhgfs"}
_OVER_FUSE = ("ceph", "gcsfuse", "gluster", "mount-s3", "nfs", "rclone", "s3fs", "smb", "sshfs", "vmhgfs")


@dataclass(frozen=True, slots=True)
class Drive:
    """``device`` is st_dev; ``kind`` the type of the file system, "" if unknown."""

    device: int
    kind: str
    network: bool
    removable: bool

    @property
    def caution(self) -> str:
        """What a person should know before reading gigabytes from it, or ""."""
        if self.network:
            return f"is on a network file system ({self.kind}): every expert is read over the network"
        if self.removable:
            return "is on a removable drive: do not pull it out while the model is open, and expect it to be slow"
        return ""


def drive_of(path: str, root: Path = Path("/")) -> Drive:
    """The drive of an existing file. ``root`` is where /proc and /sys are found. Raises OSError if there is no file."""
    device = os.stat(path).st_dev
    kind, numbers = mount_of(os.path.realpath(path), root)
    shared = kind in _NETWORK
    if kind.startswith("fuse."):
        shared = kind.removeprefix("fuse.").startswith(_OVER_FUSE)
    own = f"{os.major(device)}:{os.minor(device)}"
    return Drive(device, kind, shared, any(_removable(root / "sys/dev/block" / n) for n in {own, numbers} if n))


def mount_of(path: str, root: Path) -> tuple[str, str]:
    """Type and device numbers of the mount that ``path`` lies in; of mounts over one another the last counts."""
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", ""
    best, found = -1, ("", "")
    for line in lines:
        words, _, rest = line.partition(" - ")
        fields, kind = words.split(), rest.split(" ")[0]
        if len(fields) < 5:
            continue
        point = fields[4].encode().decode("unicode_escape", errors="replace") if "\\" in fields[4] else fields[4]
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, found = len(point), (kind, fields[2])
    return found


def _removable(block: Path) -> bool:
    """A partition does not say so itself, its disk does; a disk on USB counts, whatever it says."""
    try:
        place = block.resolve(strict=True)
    except OSError:
        return False
    for folder in (place, place.parent):
        try:
            if (folder / "removable").read_text(encoding="ascii").strip() == "1":
                return True
        except (OSError, ValueError):
            continue
    return any(part.startswith("usb") for part in place.parts)
