"""/proc and /sys of machines that are not here, as files: written in the form in which their kernels show them."""

from __future__ import annotations

import os
from pathlib import Path

GIB = 1 << 30


def meminfo(total: int, available: int, swap: int = 0, swap_free: int | None = None) -> str:
    """In KiB."""
    free = swap if swap_free is None else swap_free
    return (
        f"MemTotal:       {total} kB\nMemFree:         {available // 2} kB\nMemAvailable:   {available} kB\n"
        f"SwapTotal:      {swap} kB\nSwapFree:       {free} kB\n"
        f"CommitLimit:    {total} kB\nCommitted_AS:   {total // 2} kB\n"
    )


def limits(locked: str = "unlimited", addresses: str = "unlimited") -> str:
    return (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max locked memory         {locked:20} {locked:20} bytes     \n"
        f"Max address space         {addresses:20} {addresses:20} bytes     \n"
    )


def mount(kind: str, source: str, numbers: str = "9:9", options: str = "rw,relatime") -> str:
    """``{folder}`` becomes the folder that the model lies in."""
    return (
        "21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
        f"30 21 {numbers} / {{folder}} {options} shared:2 - {kind} {source} rw\n"
    )


def plant(root: Path, files: dict[str, str], folder: str) -> Path:
    """Write a tree. A text that begins with ``->`` is a symbolic link."""
    for name, text in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("->"):
            target = root / text[2:]
            target.mkdir(parents=True, exist_ok=True)
            os.symlink(target, place)
        else:
            place.write_text(text.replace("{folder}", os.path.realpath(folder)), encoding="utf-8")
    return root


_PLAIN = {
    "proc/meminfo": meminfo(16 << 20, 12 << 20, 4 << 20),
    "proc/self/limits": limits(),
    "proc/self/cgroup": "0::/\n",
    "proc/sys/vm/max_map_count": "1048576\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "proc/sys/kernel/osrelease": "6.12.9-amd64\n",
    "proc/version": "Linux version 6.12.9-amd64 (builder) #1 SMP\n",
    "proc/loadavg": "0.01 0.02 0.00 1/200 4242\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}
_SSD = {
    "proc/self/mountinfo": mount("ext4", "/dev/nvme0n1p2", "259:2"),
    "sys/dev/block/259:2": "->sys/devices/pci0000:00/nvme/nvme0/nvme0n1/nvme0n1p2",
    "sys/devices/pci0000:00/nvme/nvme0/nvme0n1/nvme0n1p2/partition": "2\n",
    "sys/devices/pci0000:00/nvme/nvme0/nvme0n1/queue/rotational": "0\n",
    "sys/devices/pci0000:00/nvme/nvme0/nvme0n1/removable": "0\n",
}

DESKTOP = {**_PLAIN, **_SSD}

WSL = {
    **_PLAIN,
    "proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n",
    "proc/version": "Linux version 5.15.167.4-microsoft-standard-WSL2 (root@host) #1 SMP\n",
    "proc/self/mountinfo": mount("9p", "C:\\134", "0:51", "rw,noatime"),
    "proc/sys/vm/max_map_count": "65530\n",
}

ANDROID = {  # /proc/stat and the limits of groups may not be read by an app
    **_PLAIN,
    "proc/meminfo": meminfo(11 << 20, 3 << 20, 4 << 20, 1 << 20),
    "proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n/dev/block/zram0\tpartition\t4194300\t3145728\t-2\n",
    "proc/self/limits": limits(locked="65536"),
    "proc/self/cgroup": "3:cpuset:/top-app\n0::/uid_10234/pid_4242\n",
    "proc/self/mountinfo": mount("f2fs", "/dev/block/dm-48", "254:48"),
    "proc/sys/kernel/osrelease": "5.15.148-android13-8-00001-g1a2b3c4d5e6f\n",
    "proc/version": "Linux version 5.15.148-android13-8 (build-user@build-host)\n",
    "proc/sys/vm/max_map_count": "65530\n",
    "system/build.prop": "ro.build.version.release=14\n",
    **{
        f"sys/devices/system/cpu/cpu{index}/cpu_capacity": f"{speed}\n"
        for index, speed in enumerate([250, 250, 250, 250, 740, 740, 740, 1024])
    },
    "sys/class/thermal/thermal_zone0/type": "cpu-1-7\n",
    "sys/class/thermal/thermal_zone0/temp": "61500\n",
    "sys/class/thermal/thermal_zone1/type": "broken\n",
    "sys/class/thermal/thermal_zone1/temp": "-274000\n",
}

RASPBERRY = {
    **_PLAIN,
    "proc/meminfo": meminfo(8 << 20, 6 << 20, 512 << 10),
    "proc/sys/kernel/osrelease": "6.6.51+rpt-rpi-2712\n",
    "proc/self/mountinfo": mount("ext4", "/dev/mmcblk0p2", "179:2"),
    "sys/dev/block/179:2": "->sys/devices/platform/soc/mmc0/mmc0:aaaa/block/mmcblk0/mmcblk0p2",
    "sys/devices/platform/soc/mmc0/mmc0:aaaa/block/mmcblk0/mmcblk0p2/partition": "2\n",
    "sys/devices/platform/soc/mmc0/mmc0:aaaa/block/mmcblk0/queue/rotational": "0\n",
    "sys/devices/platform/soc/mmc0/mmc0:aaaa/block/mmcblk0/removable": "0\n",
    "sys/devices/platform/soc/mmc0/mmc0:aaaa/block/mmcblk0/device/type": "SD\n",
}

DOCKER = {
    **_PLAIN,
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": mount("overlay", "overlay", "0:60"),
    ".dockerenv": "",
    "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
    "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
    "sys/fs/cgroup/memory.high": "max\n",
    "sys/fs/cgroup/memory.current": f"{GIB // 2}\n",
    "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 0\n",
    "sys/fs/cgroup/memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 0\n",
    "sys/fs/cgroup/cpu.max": "50000 100000\n",
    "sys/fs/cgroup/cpu.stat": "usage_usec 1\nnr_periods 10\nnr_throttled 0\n",
}

DOCKER_V1 = {
    **_PLAIN,
    "proc/self/cgroup": "5:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}

NFS = {
    **_PLAIN,
    "proc/self/mountinfo": mount("nfs4", "server:/models", "0:44"),
    "proc/sys/vm/overcommit_memory": "2\n",
    "proc/sys/vm/max_map_count": "16384\n",
    "proc/self/limits": limits(locked="8388608", addresses="4294967296"),
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    "proc/meminfo": meminfo(64 << 20, 30 << 20, 8 << 20, 1 << 20),
}

SPINNING = {
    **_PLAIN,
    "proc/self/mountinfo": mount("ext4", "/dev/mapper/vg-home", "253:1"),
    "sys/dev/block/253:1": "->sys/devices/virtual/block/dm-1",
    "sys/devices/virtual/block/dm-1/slaves/sda3": "->sys/devices/pci0/ata1/block/sda/sda3",
    "sys/devices/pci0/ata1/block/sda/sda3/partition": "3\n",
    "sys/devices/pci0/ata1/block/sda/queue/rotational": "1\n",
}

TIGHT = {**_PLAIN, "proc/meminfo": meminfo(1 << 20, 100 << 10)}

EMPTY: dict[str, str] = {}
