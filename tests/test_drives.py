"""Network and removable drives are recognised from /proc and /sys, and nothing is claimed where those say nothing."""

from __future__ import annotations

import os

import pytest

from bmoe.drives import drive_of


def system(root, path, kind, *, numbers="7:3", over="", removable=None, usb=False):
    """A root with one mount of ``kind`` at the folder of ``path``, after others that must not win."""
    folder = os.path.realpath(os.path.dirname(path))
    lines = [
        "20 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw",
        f"30 20 {numbers} / {over or folder} rw - {kind} source rw",
        f"31 20 9:9 / {folder}-other rw - nfs4 elsewhere:/ rw",
        "broken",
    ]
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")
    if removable is not None:
        disk = root / "sys/devices" / ("usb2/2-1" if usb else "pci0") / "block/sdx"
        (disk / "sdx1").mkdir(parents=True)
        (disk / "removable").write_text(f"{removable}\n")
        (root / "sys/dev/block").mkdir(parents=True)
        (root / "sys/dev/block" / numbers).symlink_to(disk / "sdx1")
    return root


@pytest.fixture(name="file")
def _file(tmp_path):
    path = tmp_path / "models" / "m.gguf"
    path.parent.mkdir()
    path.write_bytes(b"x")
    return str(path)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "vboxsf", "ceph", "fuse.sshfs", "fuse.rclone"])
def test_a_network_file_system_is_said(tmp_path, file, kind):
    drive = drive_of(file, system(tmp_path / "root", file, kind))

    assert (kind, True) == (drive.kind, drive.network)
    assert kind in drive.caution


@pytest.mark.parametrize("kind", ["ext4", "overlay", "tmpfs", "fuse.ntfs-3g", "fuseblk", "f2fs"])
def test_a_local_file_system_needs_no_caution(tmp_path, file, kind):
    drive = drive_of(file, system(tmp_path / "root", file, kind, removable=0))

    assert (kind, False, False, "") == (drive.kind, drive.network, drive.removable, drive.caution)


@pytest.mark.parametrize(("removable", "usb"), [(1, False), (0, True)])
def test_the_disk_of_a_partition_says_that_it_can_be_pulled_out(tmp_path, file, removable, usb):
    drive = drive_of(file, system(tmp_path / "root", file, "vfat", removable=removable, usb=usb))

    assert drive.removable
    assert "removable drive" in drive.caution


def test_a_blank_in_a_mount_point_is_understood(tmp_path):
    path = tmp_path / "my models" / "m.gguf"
    path.parent.mkdir()
    path.write_bytes(b"x")
    over = str(path.parent).replace(" ", "\\040")

    assert drive_of(str(path), system(tmp_path / "root", str(path), "nfs4", over=over)).network


def test_without_proc_and_sys_nothing_is_claimed(tmp_path, file):
    drive = drive_of(file, tmp_path)

    assert ("", False, False, "") == (drive.kind, drive.network, drive.removable, drive.caution)
    assert os.stat(file).st_dev == drive.device


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        drive_of(str(tmp_path / "none"))
