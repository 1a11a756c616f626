"""The watch warns and shrinks, a bounded number of times, never grows, and says nothing while there is no pressure."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.pressure import CALM_S, FAULTS_PER_S, FULL_SHARE, KEPT, SOME_SHARE, Judge, PressureWatch, Reading

MIB = 1 << 20
FLOOR = 64 * MIB


class Machine:
    """Makes readings: each step says what happened in so many seconds."""

    def __init__(self, mode="shrink", budget=1024 * MIB, floor=FLOOR):
        self.judge, self.budget = Judge(mode, floor), budget
        self.now = Reading(0.0, 0, ((0, 0), (None, None)))
        self.advice = []
        self.step()

    def step(self, seconds=1.0, *, faults=0.0, some=0.0, full=0.0):
        """One more reading; ``faults`` a second, ``some`` and ``full`` as shares of the time."""
        was = self.now
        (some_us, full_us), silent = was.stalls
        stalls = ((some_us + int(some * seconds * 1e6), full_us + int(full * seconds * 1e6)), silent)
        self.now = Reading(was.at_s + seconds, was.majflt + int(faults * seconds), stalls)
        advice = self.judge.judge(self.now, self.budget)
        if advice is not None:
            self.advice.append(advice)
            if advice.budget_bytes is not None:
                assert advice.budget_bytes < self.budget
                self.budget = advice.budget_bytes
        return advice


steps = st.lists(
    st.tuples(st.floats(0.01, 100), st.floats(0, 10 * FAULTS_PER_S), st.floats(0, 1), st.floats(0, 1)),
    max_size=80,
)


@given(steps, st.integers(0, 2048), st.sampled_from(["warn", "shrink"]))
def test_whatever_happens_it_never_grows_and_never_goes_below_the_floor(happens, budget, mode):
    machine = Machine(mode, budget * MIB)
    for seconds, faults, some, full in happens:
        machine.step(seconds, faults=faults, some=some, full=full)

    assert min(budget * MIB, FLOOR) <= machine.budget <= budget * MIB
    assert mode == "shrink" or machine.budget == budget * MIB


@given(st.integers(65, 10**6))
def test_the_number_of_shrinks_is_bounded_under_pressure_that_never_ends(budget):
    machine = Machine(budget=budget * MIB)
    for _ in range(400):
        machine.step(full=1.0)
    shrinks = [advice for advice in machine.advice if advice.budget_bytes is not None]

    assert machine.budget == FLOOR
    assert len(shrinks) <= 1 + 35  # a quarter less each time: a million MiB become 64 in 34 steps
    assert len(machine.advice) == len(shrinks)


@given(steps)
def test_without_pressure_it_is_silent(happens):
    machine = Machine()
    for seconds, faults, some, full in happens:
        calm = {"faults": faults / 11, "some": some * SOME_SHARE * 0.99, "full": full * FULL_SHARE * 0.99}
        assert machine.step(max(1.0, seconds), **calm) is None


@pytest.mark.parametrize(
    ("sign", "said"),
    [
        ({"faults": 350.0}, "350 major faults a second"),
        ({"some": 0.5}, "some tasks stalled on memory 50% of the time"),
        ({"full": 0.1}, "all tasks stalled on memory 10% of the time"),
        ({"faults": 200.0, "full": 0.07}, "200 major faults a second, all tasks stalled on memory 7% of the time"),
    ],
)
def test_two_windows_in_a_row_count_and_the_reason_says_what_was_seen(sign, said):
    machine = Machine()
    assert machine.step(**sign) is None
    advice = machine.step(**sign)

    assert (said, int(1024 * MIB * KEPT)) == (advice.reason, advice.budget_bytes)


def test_a_single_bad_window_is_none():
    machine = Machine()
    for _ in range(20):
        assert machine.step(full=1.0) is None
        assert machine.step() is None


def test_it_shrinks_once_in_two_windows_and_not_at_every_token():
    machine = Machine()
    for _ in range(40):
        machine.step(0.25, full=1.0)

    assert 10 / 2 == len(machine.advice)


def test_a_warning_is_given_once_until_it_was_calm_for_a_while():
    machine = Machine("warn")
    for _ in range(20):
        machine.step(full=1.0)
    assert 1 == len(machine.advice)
    machine.step(CALM_S)
    for _ in range(4):
        machine.step(full=1.0)

    assert 2 == len(machine.advice)
    assert {None} == {advice.budget_bytes for advice in machine.advice}


def proc(root, some, full):
    place = root / "proc/pressure/memory"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={some}\nfull avg10=0.00 total={full}\n")


def test_the_watch_reads_the_stalls_of_the_machine_and_of_its_group(tmp_path):
    proc(tmp_path, 0, 0)
    group = tmp_path / "sys/fs/cgroup/unified/app"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/app\n")
    (group / "memory.pressure").write_text("some avg10=0.00 total=0\nfull avg10=0.00 total=0\n")
    now = [0.0]
    watch = PressureWatch("shrink", FLOOR, root=tmp_path, clock=lambda: now[0])
    for second in (1, 2):
        assert watch.sample(1024 * MIB) is None
        now[0] = float(second)
        (group / "memory.pressure").write_text(f"some total={second * 300_000}\nfull total={second * 300_000}\n")
    advice = watch.sample(1024 * MIB)
    watch.close()
    watch.close()

    assert "all tasks stalled on memory 30% of the time" in advice.reason
    assert 768 * MIB == advice.budget_bytes


def test_between_two_windows_nothing_is_read(tmp_path, monkeypatch):
    proc(tmp_path, 0, 0)
    now = [5.0]
    watch = PressureWatch("warn", FLOOR, root=tmp_path, clock=lambda: now[0])
    watch.sample(0)
    monkeypatch.setattr(os, "pread", lambda *a: pytest.fail("a file was read within a window"))
    for at in (5.1, 5.5, 5.99):
        now[0] = at
        assert watch.sample(0) is None
    watch.close()


@pytest.mark.parametrize("text", ["", "garbage", "some total=many\nfull\n"])
def test_where_the_system_tells_nothing_there_is_no_pressure(tmp_path, text):
    place = tmp_path / "proc/pressure/memory"
    place.parent.mkdir(parents=True)
    place.write_text(text)
    now = [0.0]
    watch = PressureWatch("shrink", FLOOR, root=tmp_path, clock=lambda: now[0])
    for _ in range(5):
        now[0] += 1000.0  # so that real faults of this process are no rate
        assert watch.sample(1024 * MIB) is None
    watch.close()
