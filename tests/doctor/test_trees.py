"""The verdicts on machines that are not here, and that whatever is missing is said and never guessed."""

from __future__ import annotations

import os

import pytest

from bmoe.doctor import drive, limits, processor, software, trials
from bmoe.doctor.apart import Answer
from bmoe.doctor.findings import Sources
from bmoe.doctor.report import CHECKS, FAILED, look
from bmoe.errors import NativeError
from tests.doctor import trees

BY_NAME = {check.name: check for check in CHECKS}
NOWHERE = Answer(failure="not asked in this test")


@pytest.fixture(name="find")
def _find(tmp_path):
    """``find(tree, check, probe=Answer)``: one check's finding on a planted tree."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "m.gguf").write_bytes(b"GGUF" + bytes(8192))

    def find(tree, name, answer=NOWHERE, *, quick=False):
        root = trees.plant(tmp_path / f"root-{len(os.listdir(tmp_path))}", tree, str(folder))
        check = BY_NAME[name]
        found = look(check, Sources(str(folder / "m.gguf"), quick, root, lambda *_: answer))
        assert (found.verdict == "ok") == (found.remedy == "")
        assert found.remedy in ("", *check.remedies)
        return found

    return find


def test_a_plain_desktop_needs_nothing(find):
    names = [check.name for check in (*limits.CHECKS, *drive.CHECKS[:3]) if check.name != "disk space"]
    found = {name: find(trees.DESKTOP, name) for name in ("system", *names)}

    assert {} == {name: each.measured for name, each in found.items() if each.verdict != "ok"}
    assert "ext4 on /dev/nvme0n1p2" == found["file system"].measured
    assert "12 GiB free of 16 GiB" == found["memory"].measured


@pytest.mark.parametrize(
    ("tree", "name", "remedy", "measured"),
    [
        (trees.WSL, "system", software.WSL, "WSL 2: "),
        (trees.WSL, "file system", drive.WINDOWS, "9p on C:\\"),
        (trees.ANDROID, "system", software.ANDROID, "Android: "),
        (trees.ANDROID, "swap", limits.SWAPPED, "3 GiB of 4 GiB used (compressed memory)"),
        (trees.ANDROID, "locked memory", limits.LOCK, "at most 64 KiB"),
        (trees.ANDROID, "cores", processor.MIXED, "4 of 8 are fast ones"),
        (trees.RASPBERRY, "file system", drive.SD, "ext4 on /dev/mmcblk0p2, an SD card"),
        (trees.DOCKER, "file system", drive.OVERLAY, "overlay"),
        (trees.DOCKER, "control groups", limits.GROUP, "version 2: memory.max 2 GiB"),
        (trees.DOCKER, "cores", processor.QUOTA, "1 usable, by a quota of 0.5 processors"),
        (trees.DOCKER_V1, "control groups", limits.GROUP_KILLS, "version 1: memory.limit_in_bytes 3 GiB, 2 processes"),
        (trees.DOCKER_V1, "cores", processor.QUOTA, "by a quota of 0.5 processors"),
        (trees.NFS, "file system", drive.NETWORK, "nfs4 on server:/models"),
        (trees.NFS, "overcommit", limits.COMMIT, "vm.overcommit_memory = 2, 32 GiB may be reserved"),
        (trees.NFS, "mappings", limits.MAPS, "vm.max_map_count = 16384"),
        (trees.NFS, "address space", limits.ADDRESSES, "at most 4 GiB"),
        (trees.NFS, "huge pages", limits.HUGE, "never"),
        (trees.NFS, "swap", limits.SWAPPED, "7 GiB of 8 GiB used"),
        (trees.SPINNING, "file system", drive.SPINNING, "ext4 on /dev/mapper/vg-home, a spinning disk"),
        (trees.EMPTY, "memory", limits.UNTOLD, "/proc/meminfo"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_what_a_machine_lacks_is_noted_with_its_remedy(find, tree, name, remedy, measured):
    found = find(tree, name)

    assert ("note", remedy) == (found.verdict, found.remedy)
    assert measured in found.measured


@pytest.mark.parametrize(
    ("tree", "name", "measured"),
    [
        (trees.WSL, "mappings", "vm.max_map_count = 65530"),
        (trees.ANDROID, "file system", "f2fs on /dev/block/dm-48"),
        (trees.ANDROID, "control groups", "no limit on memory"),
        (trees.DOCKER, "system", "in a container (docker)"),
        (trees.DOCKER, "memory", "1.5 GiB free of 16 GiB"),
        (trees.RASPBERRY, "swap", "0 bytes of 512 MiB used"),
        (trees.NFS, "locked memory", None),
    ],
)
def test_and_what_is_well_is_not(find, tree, name, measured):
    found = find(tree, name)

    assert ("note" if measured is None else "ok") == found.verdict
    assert (measured or "at most 8 MiB") in found.measured


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("fuse.sshfs", drive.NETWORK),
        ("fuse.rclone", drive.NETWORK),
        ("cifs", drive.NETWORK),
        ("9p", drive.NETWORK),
        ("fuseblk", drive.FUSE),
        ("fuse.ntfs-3g", drive.FUSE),
        ("tmpfs", drive.IN_MEMORY),
        ("sdcardfs", drive.SHARED),
        ("btrfs", ""),
        ("xfs", ""),
    ],
)
def test_every_kind_of_mount_has_its_remedy(find, kind, remedy):
    assert remedy == find({**trees.DESKTOP, "proc/self/mountinfo": trees.mount(kind, "source")}, "file system").remedy


def test_shared_storage_of_android_is_told_from_other_fuse(tmp_path):
    sources = Sources(str(tmp_path), root=trees.plant(tmp_path / "root", trees.ANDROID, str(tmp_path)))

    assert drive.SHARED == drive._kind_remedy("fuse", "/storage/emulated/0/Download/m.gguf", sources)
    assert drive.FUSE == drive._kind_remedy("fuse", "/mnt/somewhere/m.gguf", sources)


def test_memory_that_not_even_the_demo_fits_in_is_a_problem(find):
    found = find(trees.TIGHT, "memory")

    assert ("problem", limits.FREE, "100 MiB free of 1 GiB") == (found.verdict, found.remedy, found.measured)


@pytest.mark.parametrize("check", [*limits.CHECKS, *processor.CHECKS[:1], *drive.CHECKS[:3]], ids=lambda c: c.name)
def test_a_machine_that_shows_nothing_is_no_failure(find, check):
    found = find(trees.EMPTY, check.name)

    assert found.remedy != FAILED
    assert found.verdict != "problem"


def test_garbage_is_as_good_as_nothing(find):
    garbage = dict.fromkeys(trees.DOCKER, "\0\xff x -1 \n::::\n[") | {".dockerenv": ""}
    for name in (*(check.name for check in limits.CHECKS), "cores", "file system", "sharing"):
        assert find(garbage, name).remedy != FAILED, name


def test_the_temperature_is_of_the_hottest_sensor_that_works(tmp_path):
    root = trees.plant(tmp_path, trees.ANDROID, str(tmp_path))

    assert 61.5 == processor.temperature(root)
    assert processor.temperature(tmp_path / "nothing") is None


def phases(*shares, granted=1.0):
    same = {"seconds": 10, "first": 100, "granted": granted}
    return Answer([{**same, "threads": index + 1, "last": 100 * share} for index, share in enumerate(shares)])


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        (phases(1.0, 0.97), ""),
        (phases(1.0, 0.7), processor.COOL),
        (phases(1.0, 0.7, granted=0.5), processor.ALONE),
        (Answer(failure="ended by SIGILL"), processor.NO_TRIAL),
    ],
)
def test_slower_at_the_end_is_heat_unless_others_took_the_cores(find, answer, remedy):
    assert remedy == find(trees.DESKTOP, "throttling", answer).remedy


def test_a_quota_that_halts_is_not_taken_for_heat(tmp_path):
    root = trees.plant(tmp_path, trees.DOCKER, str(tmp_path))

    def ask(*_):
        (root / "sys/fs/cgroup/cpu.stat").write_text("nr_throttled 41\n")
        return phases(1.0, 0.5)

    found = processor.throttling(Sources(str(tmp_path), root=root, ask=ask))
    assert processor.THROTTLED == found.remedy
    assert "halted the group 41 times" in found.measured


@pytest.mark.parametrize(
    ("speeds", "verdict", "best"),
    [({"1": 60, "2": 110}, "ok", 2), ({"1": 400, "2": 30}, "note", 1), ({"1": 1713.5, "2": 1543.6}, "ok", 1)],
)
def test_the_number_of_threads_is_the_one_that_was_faster(find, speeds, verdict, best):
    found = find(trees.DESKTOP, "threads", Answer([speeds]))

    assert (verdict, best) == (found.verdict, found.values["best"])


def test_on_idle_cores_a_small_model_gives_no_advice(tmp_path):
    sources = Sources(str(tmp_path), ask=lambda *_: Answer([{"1": 400, "16": 90}]), known={"shared": False})

    assert "ok" == processor.threads(sources).verdict


@pytest.mark.parametrize(("lost", "remedy"), [(0.0, ""), (0.6, processor.SHARE)])
def test_threads_that_wait_for_each_other_say_that_cores_are_shared(find, monkeypatch, lost, remedy):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    found = find(trees.DESKTOP, "sharing", Answer([{"lost": lost}]))

    assert remedy == found.remedy
    assert not remedy or found.measured.endswith(": 1 thread")


@pytest.mark.parametrize("name", ["threads", "throttling"])
def test_what_a_quick_round_leaves_out_it_says(find, name):
    found = find(trees.DESKTOP, name, quick=True)

    assert ("note", "skipped with --quick", processor.UNMEASURED) == (found.verdict, found.measured, found.remedy)


def test_the_rate_of_a_stretch_is_work_by_processor_time_over_all_threads():
    """Half as fast at the end; of the second thread's time another process took the half, which is not counted."""
    first = [(second / 10, 0.01) for second in range(50)] + [(5 + second / 5, 0.02) for second in range(25)]
    second = [(second / 5, 0.01) for second in range(25)] + [(5 + second / 2.5, 0.02) for second in range(12)]

    assert 100 == trials._rate([first, second], 0, 5)
    assert 50 == trials._rate([first, second], 5, 10)
    with pytest.raises(NativeError, match="did nothing"):
        trials._rate([first, second], 11, 12)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_that_share_one_core_lose_most_of_their_time_to_each_other():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("cannot be tied to one core here")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        found = trials.probe_barrier(0.4)
    finally:
        os.sched_setaffinity(0, allowed)

    assert found["lost"] > 0.5
    assert found["turns"] > 0
