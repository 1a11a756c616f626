"""What the machine grants is read from /proc and the control groups, and is unknown rather than wrong elsewhere."""

from __future__ import annotations

import os

import pytest

from bmoe.machine import read_machine

MIB = 1 << 20


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable:    1048576 kB\n"}


def test_this_machine_can_be_read():
    machine = read_machine()

    assert machine.cpus >= 1
    assert machine.page_bytes % 4096 == 0
    assert machine.available_bytes is None or machine.available_bytes > 0


def test_without_limits_all_available_memory_counts(tmp_path):
    machine = read_machine(tree(tmp_path, {**MEMINFO, "proc/sys/vm/max_map_count": "65530\n"}))

    assert (1024 * MIB, 65530) == (machine.available_bytes, machine.max_map_count)


def test_off_linux_memory_is_unknown_and_not_zero(tmp_path):
    machine = read_machine(tmp_path)

    assert (None, None) == (machine.available_bytes, machine.max_map_count)


def test_a_group_of_version_2_limits_memory_and_its_file_cache_counts_as_free(tmp_path):
    group = "sys/fs/cgroup/app/job"
    root = tree(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/app/job\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": f"{9 * MIB}\n",
            "sys/fs/cgroup/app/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/app/memory.current": f"{80 * MIB}\n",
            "sys/fs/cgroup/app/memory.stat": f"anon 5\ninactive_file {30 * MIB}\n",
        },
    )

    assert 50 * MIB == read_machine(root).available_bytes


@pytest.mark.parametrize("folder", ["docker/abc", ""])
def test_a_group_of_version_1_limits_memory_also_where_its_path_is_the_hosts(tmp_path, folder):
    group = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    root = tree(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "3:cpuset:/\n2:memory:/docker/abc\n",
            f"{group}/memory.limit_in_bytes": f"{64 * MIB}\n",
            f"{group}/memory.usage_in_bytes": f"{60 * MIB}\n",
            f"{group}/memory.stat": f"total_inactive_file {MIB}\n",
        },
    )

    assert 5 * MIB == read_machine(root).available_bytes


def test_memory_above_which_a_group_is_slowed_down_is_not_free(tmp_path):
    files = {"memory.max": 100 * MIB, "memory.high": 70 * MIB, "memory.current": 30 * MIB}
    root = tree(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/app\n",
            **{f"sys/fs/cgroup/app/{name}": str(value) for name, value in files.items()},
        },
    )

    assert 40 * MIB == read_machine(root).available_bytes


def test_the_limit_of_a_group_of_version_1_that_is_not_shown_counts(tmp_path):
    group = "sys/fs/cgroup/memory"
    root = tree(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "2:memory:/\n",
            f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{group}/memory.usage_in_bytes": f"{20 * MIB}\n",
            f"{group}/memory.stat": f"hierarchical_memory_limit {50 * MIB}\ntotal_inactive_file 0\n",
        },
    )

    assert 30 * MIB == read_machine(root).available_bytes


def test_version_2_beside_version_1_is_found_where_it_is_mounted(tmp_path):
    root = tree(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "4:memory:/a\n0::/b\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{90 * MIB}\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "0\n",
            "sys/fs/cgroup/unified/b/memory.max": f"{60 * MIB}\n",
            "sys/fs/cgroup/unified/b/memory.current": "0\n",
        },
    )

    assert 60 * MIB == read_machine(root).available_bytes


def test_use_beyond_the_limit_leaves_nothing_and_nothing_negative(tmp_path):
    root = tree(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "10\n",
            "sys/fs/cgroup/memory.current": "20\n",
        },
    )

    assert 0 == read_machine(root).available_bytes


def test_a_quota_of_processor_time_limits_the_threads(tmp_path):
    for text, most in (("150000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", 10_000)):
        root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": text})

        assert min(most, len(os.sched_getaffinity(0))) == read_machine(root).cpus


def test_garbage_is_unknown(tmp_path):
    root = tree(tmp_path, {"proc/meminfo": "MemAvailable: lots\n", "proc/self/cgroup": "nonsense\n:\n0::/../..\n"})

    assert read_machine(root).available_bytes is None
