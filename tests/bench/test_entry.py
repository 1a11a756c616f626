"""What a machine says of its state, and what is made of one that says nothing or nonsense."""

from __future__ import annotations

import pytest

from bmoe.bench.entry import read_entry_state


@pytest.fixture(name="machine")
def _machine(tmp_path):
    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


ZONE = "sys/class/thermal/thermal_zone"
CLOCK = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_cur_freq"


def test_everything_is_read(machine):
    root = machine(**{
        "proc/loadavg": "1.25 1.00 0.50 2/345 6789\n",
        "proc/meminfo": "MemTotal: 8000 kB\nMemAvailable: 4000 kB\n",
        f"{ZONE}0/temp": "41000\n",
        f"{ZONE}1/temp": "63500\n",
        "sys/class/hwmon/hwmon0/temp1_input": "50000\n",
        CLOCK.format(0): "1800000\n",
        CLOCK.format(1): "2200000\n",
    })  # fmt: skip
    found = read_entry_state(root)

    assert (1.25, 4000 * 1024, 63.5, 2000.0) == (
        found.load_1min, found.available_bytes, found.temperature_c, found.cpu_mhz,
    )  # fmt: skip


def test_a_machine_that_says_nothing_is_unmeasured_and_not_zero(tmp_path):
    found = read_entry_state(tmp_path)

    assert (None, None, None, None) == (found.load_1min, found.available_bytes, found.temperature_c, found.cpu_mhz)


@pytest.mark.parametrize("text", ["", "hot", "-273000", "0", "200000", "4e4", "\xff"])
def test_a_sensor_that_is_broken_is_left_out(machine, text):
    root = machine(**{f"{ZONE}0/temp": text, "proc/loadavg": text})
    assert read_entry_state(root).temperature_c is None

    machine(**{f"{ZONE}1/temp": "30000"})
    assert 30.0 == read_entry_state(root).temperature_c


def test_this_machine_has_a_load():
    assert read_entry_state().load_1min is not None
